//! Functions that the library exports, found by name in a library opened at run time.

use crate::abi::*;
use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;

/// The library's name by its ABI version, as the dynamic loader finds it.
pub const DEFAULT_LIBRARY: &CStr = c"libibverbs.so.1";

/// Why there are no verbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadError {
    /// The library could not be opened.
    NoLibrary {
        /// What was asked for.
        library: CString,
        /// What the dynamic loader said.
        reason: String,
    },
    /// The library lacks a function that cannot be done without.
    NoSymbol {
        /// What was opened.
        library: CString,
        /// The function.
        symbol: &'static CStr,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::NoLibrary { library, reason } => write!(
                f,
                "cannot open {}: {reason}; install rdma-core's library and the provider of your \
                 card to use RDMA",
                library.to_string_lossy()
            ),
            LoadError::NoSymbol { library, symbol } => write!(
                f,
                "{} has no function {}; rdma-core 18 or later is needed",
                library.to_string_lossy(),
                symbol.to_string_lossy()
            ),
        }
    }
}

impl Error for LoadError {}

macro_rules! verbs {
    (
        required { $($name:ident = $symbol:literal: fn($($arg:ty),*) -> $ret:ty;)* }
        optional { $($opt_name:ident = $opt_symbol:literal: fn($($opt_arg:ty),*) -> $opt_ret:ty;)* }
    ) => {
        /// The exported functions, under their names less `ibv_`. Those that not every library
        /// in use has are `Option`s.
        ///
        /// Calling any of them is unsafe in the way its manual page says.
        #[allow(missing_docs)] // the manual pages' names
        #[derive(Clone, Copy)]
        pub struct Verbs {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> $ret,)*
            $(pub $opt_name: Option<unsafe extern "C" fn($($opt_arg),*) -> $opt_ret>,)*
        }

        impl Verbs {
            /// Takes the functions from `find`, which answers null for what it does not have.
            ///
            /// # Safety
            /// What `find` answers for a name must be a function of that name's signature in the
            /// verbs ABI, callable for the rest of the process.
            ///
            /// # Errors
            /// The first required name that `find` does not have.
            pub unsafe fn from_symbols(
                mut find: impl FnMut(&'static CStr) -> *mut c_void,
            ) -> Result<Self, &'static CStr> {
                $(let $name = find($symbol);
                if $name.is_null() {
                    return Err($symbol);
                })*
                $(let $opt_name = find($opt_symbol);)*
                Ok(Verbs {
                    $(
                        // SAFETY: not null, and of this signature by the caller's promise.
                        $name: unsafe { std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($arg),*) -> $ret,
                        >($name) },
                    )*
                    $(
                        // SAFETY: of this signature by the caller's promise; a null pointer
                        // is the `None` of an optional function pointer.
                        $opt_name: unsafe { std::mem::transmute::<
                            *mut c_void,
                            Option<unsafe extern "C" fn($($opt_arg),*) -> $opt_ret>,
                        >($opt_name) },
                    )*
                })
            }
        }
    };
}

verbs! {
    required {
        get_device_list = c"ibv_get_device_list": fn(*mut c_int) -> *mut *mut ibv_device;
        free_device_list = c"ibv_free_device_list": fn(*mut *mut ibv_device) -> ();
        get_device_name = c"ibv_get_device_name": fn(*mut ibv_device) -> *const c_char;
        open_device = c"ibv_open_device": fn(*mut ibv_device) -> *mut ibv_context;
        close_device = c"ibv_close_device": fn(*mut ibv_context) -> c_int;
        query_device = c"ibv_query_device": fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        query_port = c"ibv_query_port": fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        query_gid = c"ibv_query_gid": fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        alloc_pd = c"ibv_alloc_pd": fn(*mut ibv_context) -> *mut ibv_pd;
        dealloc_pd = c"ibv_dealloc_pd": fn(*mut ibv_pd) -> c_int;
        reg_mr = c"ibv_reg_mr": fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        dereg_mr = c"ibv_dereg_mr": fn(*mut ibv_mr) -> c_int;
        create_comp_channel = c"ibv_create_comp_channel":
            fn(*mut ibv_context) -> *mut ibv_comp_channel;
        destroy_comp_channel = c"ibv_destroy_comp_channel": fn(*mut ibv_comp_channel) -> c_int;
        create_cq = c"ibv_create_cq":
            fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        destroy_cq = c"ibv_destroy_cq": fn(*mut ibv_cq) -> c_int;
        get_cq_event = c"ibv_get_cq_event":
            fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ack_cq_events = c"ibv_ack_cq_events": fn(*mut ibv_cq, c_uint) -> ();
        create_qp = c"ibv_create_qp": fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        modify_qp = c"ibv_modify_qp": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        destroy_qp = c"ibv_destroy_qp": fn(*mut ibv_qp) -> c_int;
        get_async_event = c"ibv_get_async_event":
            fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ack_async_event = c"ibv_ack_async_event": fn(*mut ibv_async_event) -> ();
        wc_status_str = c"ibv_wc_status_str": fn(ibv_wc_status) -> *const c_char;
    }
    optional {
        // With `IBV_ACCESS_RELAXED_ORDERING`, which `ibv_reg_mr` refuses.
        reg_mr_iova2 = c"ibv_reg_mr_iova2":
            fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
        reg_dmabuf_mr = c"ibv_reg_dmabuf_mr":
            fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        // The type of a GID (RoCE v1 or v2); without it sysfs tells.
        query_gid_ex = c"_ibv_query_gid_ex":
            fn(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
    }
}

impl Verbs {
    /// Opens `library` ([`DEFAULT_LIBRARY`] in production) and finds its functions. The library stays open: its functions
    /// and the threads of its providers live as long as the process.
    ///
    /// # Errors
    /// That the library cannot be opened or lacks a function, with what to do.
    pub fn load(library: &CStr) -> Result<Self, LoadError> {
        // SAFETY: a string that ends in a zero; the library's own start-up code is trusted as
        // any library's that is linked.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(LoadError::NoLibrary {
                library: library.to_owned(),
                reason: loader_said(),
            });
        }
        // SAFETY: libibverbs' functions of these names have these signatures in ABI version 1,
        // which the file name says; the handle is never closed. `dlsym` gets a live handle and a string that ends in a zero.
        unsafe { Verbs::from_symbols(|symbol| libc::dlsym(handle, symbol.as_ptr())) }.map_err(
            |symbol| LoadError::NoSymbol {
                library: library.to_owned(),
                symbol,
            },
        )
    }
}

/// The dynamic loader's last words on this thread.
fn loader_said() -> String {
    // SAFETY: `dlerror` has no precondition; what it returns ends in a zero and stays until the
    // next call of the loader on this thread.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return "no reason given".to_owned();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_names_it() {
        let error = Verbs::load(c"libibverbs-that-is-not-there.so.1").err();
        let text = error.map(|error| error.to_string()).unwrap_or_default();
        assert!(text.contains("libibverbs-that-is-not-there.so.1"), "{text}");
        assert!(text.contains("rdma-core"), "{text}");
    }

    #[test]
    fn a_library_without_verbs_is_an_error_that_names_the_function() {
        let error = Verbs::load(c"libc.so.6").err();
        assert_eq!(
            error,
            Some(LoadError::NoSymbol {
                library: c"libc.so.6".to_owned(),
                symbol: c"ibv_get_device_list",
            })
        );
    }

    #[test]
    fn optional_functions_may_be_missing() {
        let optional = [
            c"ibv_reg_mr_iova2",
            c"ibv_reg_dmabuf_mr",
            c"_ibv_query_gid_ex",
        ];
        let some = loader_said as fn() -> String as *mut c_void;
        // SAFETY: none of the functions is called.
        let verbs = unsafe {
            Verbs::from_symbols(|symbol| {
                if optional.contains(&symbol) {
                    std::ptr::null_mut()
                } else {
                    some
                }
            })
        };
        let verbs = verbs.unwrap_or_else(|symbol| panic!("{symbol:?} is required"));
        assert!(verbs.reg_mr_iova2.is_none());
        assert!(verbs.reg_dmabuf_mr.is_none());
        assert!(verbs.query_gid_ex.is_none());
    }
}
