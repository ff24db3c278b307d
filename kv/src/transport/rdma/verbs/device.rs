//! The library, its devices, and what is known of them.

use super::{VerbError, make_nonblocking};
use rdma_core_sys::{
    self as sys, LoadError, Verbs, ibv_async_event, ibv_context, ibv_device, ibv_device_attr,
    ibv_gid, ibv_gid_entry, ibv_pd, ibv_port_attr,
};
use std::ffi::CStr;
use std::os::fd::RawFd;
use std::rc::Rc;

/// GIDs looked at on one port: more than any card in use has (mlx5: 256).
const GIDS_MAX: u32 = 256;

/// Devices listed: a host with more is told of the first ones only.
const DEVICES_MAX: usize = 64;

/// `libibverbs`, loaded.
#[derive(Clone)]
pub struct Library {
    pub(super) verbs: Rc<Verbs>,
}

impl Library {
    /// The system's library.
    ///
    /// # Errors
    /// That it is not there or too old, with what to install.
    pub fn system() -> Result<Self, LoadError> {
        Ok(Library::of(Verbs::load(sys::DEFAULT_LIBRARY)?))
    }

    /// A library whose functions were found otherwise (the tests' own).
    pub fn of(verbs: Verbs) -> Self {
        Library {
            verbs: Rc::new(verbs),
        }
    }

    /// Names of the devices there are.
    ///
    /// # Errors
    /// When the library cannot list them (no kernel modules, for instance).
    pub fn devices(&self) -> Result<Vec<String>, VerbError> {
        self.with_devices(|devices| devices.iter().map(|(name, _)| name.clone()).collect())
    }

    /// Opens the device of that name.
    ///
    /// # Errors
    /// `ENODEV` when there is none, else what the library says.
    pub fn open(&self, name: &str) -> Result<Rc<Device>, VerbError> {
        self.with_devices(|devices| {
            let found = devices.iter().find(|(known, _)| known == name);
            let (_, device) = found.ok_or(VerbError::new("ibv_open_device", libc::ENODEV))?;
            Device::open(self.verbs.clone(), name, *device)
        })?
    }

    fn with_devices<T>(
        &self,
        use_them: impl FnOnce(&[(String, *mut ibv_device)]) -> T,
    ) -> Result<T, VerbError> {
        let mut count = 0;
        // SAFETY: `count` is valid for the call.
        let list = unsafe { (self.verbs.get_device_list)(&mut count) };
        if list.is_null() {
            return Err(VerbError::last("ibv_get_device_list"));
        }
        let count = (count.max(0) as usize).min(DEVICES_MAX);
        let mut devices = Vec::with_capacity(count);
        for at in 0..count {
            // SAFETY: the list has so many entries; a device's name ends in a zero and lives as
            // long as the list.
            let (name, device) = unsafe {
                let device = *list.add(at);
                let name = CStr::from_ptr((self.verbs.get_device_name)(device));
                (name.to_string_lossy().into_owned(), device)
            };
            devices.push((name, device));
        }
        let result = use_them(&devices);
        // SAFETY: it was given by `get_device_list` and is not used after; a device that was
        // opened meanwhile stays valid through its context.
        unsafe { (self.verbs.free_device_list)(list) };
        Ok(result)
    }
}

/// An opened device with a protection domain.
pub struct Device {
    pub(super) verbs: Rc<Verbs>,
    pub(super) context: *mut ibv_context,
    pub(super) domain: *mut ibv_pd,
    name: String,
}

/// A port as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortFacts {
    /// Its number, from 1 on.
    pub number: u8,
    /// Whether it is ACTIVE.
    pub active: bool,
    /// `ibv_port_state`.
    pub state: u32,
    /// `ibv_mtu` in use.
    pub mtu: u32,
    /// Whether the link is Ethernet (RoCE), else InfiniBand.
    pub ethernet: bool,
    /// Local id on InfiniBand.
    pub lid: u16,
    /// The longest message, bytes.
    pub message_bytes_max: u32,
}

/// What a device can do, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Work requests of one queue.
    pub queue_max: u32,
    /// Entries of a completion queue.
    pub completions_max: u32,
    /// Scatter entries of one READ.
    pub scatter_max: u32,
    /// READs it answers at once on one queue pair.
    pub reads_answered_max: u8,
    /// READs it has under way at once on one queue pair.
    pub reads_asked_max: u8,
    /// Ports.
    pub ports: u8,
}

/// One entry of a GID table, with where it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// The GID.
    pub gid: [u8; 16],
    /// Its place in the table.
    pub index: u8,
    /// `IBV_GID_TYPE_*`.
    pub kind: u32,
}

/// An asynchronous event that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// One queue pair is in error: number, event.
    Pair(u32, u32),
    /// One port is: number, event.
    Port(u8, u32),
    /// The device, or a queue of it, is.
    Device(u32),
    /// Nothing that ends anything.
    Other(u32),
}

impl Device {
    fn open(verbs: Rc<Verbs>, name: &str, device: *mut ibv_device) -> Result<Rc<Self>, VerbError> {
        // SAFETY: the device is of a list that is not freed yet.
        let context = unsafe { (verbs.open_device)(device) };
        if context.is_null() {
            return Err(VerbError::last("ibv_open_device"));
        }
        // SAFETY: a live context.
        let domain = unsafe { (verbs.alloc_pd)(context) };
        if domain.is_null() {
            let error = VerbError::last("ibv_alloc_pd");
            // SAFETY: nothing was made of the context.
            unsafe { (verbs.close_device)(context) };
            return Err(error);
        }
        let device = Rc::new(Device {
            verbs,
            context,
            domain,
            name: name.to_owned(),
        });
        make_nonblocking(device.async_descriptor())?;
        Ok(device)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it can do.
    ///
    /// # Errors
    /// What the library says.
    pub fn limits(&self) -> Result<DeviceLimits, VerbError> {
        // SAFETY: the struct is plain numbers, for which zeros are valid.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: a live context and a valid struct.
        let answer = unsafe { (self.verbs.query_device)(self.context, &mut attr) };
        VerbError::check("ibv_query_device", answer)?;
        let number = |value: libc::c_int| value.max(0) as u32;
        let byte = |value: libc::c_int| value.clamp(0, 255) as u8;
        Ok(DeviceLimits {
            queue_max: number(attr.max_qp_wr),
            completions_max: number(attr.max_cqe),
            // Some cards take fewer entries for a READ than for a SEND; zero: not told.
            scatter_max: match (number(attr.max_sge), number(attr.max_sge_rd)) {
                (all, 0) => all,
                (all, reads) => all.min(reads),
            },
            reads_answered_max: byte(attr.max_qp_rd_atom),
            reads_asked_max: byte(attr.max_qp_init_rd_atom),
            ports: attr.phys_port_cnt,
        })
    }

    /// A port as it is now.
    ///
    /// # Errors
    /// What the library says.
    pub fn port(&self, number: u8) -> Result<PortFacts, VerbError> {
        let mut attr = ibv_port_attr::default();
        // SAFETY: a live context and a valid struct.
        let answer = unsafe { (self.verbs.query_port)(self.context, number, &mut attr) };
        VerbError::check("ibv_query_port", answer)?;
        Ok(PortFacts {
            number,
            active: attr.state == sys::IBV_PORT_ACTIVE,
            state: attr.state,
            mtu: attr.active_mtu,
            ethernet: attr.link_layer == sys::IBV_LINK_LAYER_ETHERNET,
            lid: attr.lid,
            message_bytes_max: attr.max_msg_sz,
        })
    }

    /// The GIDs of a port that are set.
    pub fn gids(&self, port: u8) -> Vec<GidEntry> {
        let mut attr = ibv_port_attr::default();
        // SAFETY: a live context and a valid struct; on failure the table is empty.
        let answer = unsafe { (self.verbs.query_port)(self.context, port, &mut attr) };
        let count = match answer {
            0 => (attr.gid_tbl_len.max(0) as u32).min(GIDS_MAX),
            _ => 0,
        };
        (0..count)
            .filter_map(|index| self.gid(port, index))
            .filter(|entry| entry.gid != [0; 16])
            .collect()
    }

    fn gid(&self, port: u8, index: u32) -> Option<GidEntry> {
        if let Some(query) = self.verbs.query_gid_ex {
            let mut entry = ibv_gid_entry::default();
            let size = size_of::<ibv_gid_entry>();
            // SAFETY: a live context, a valid struct and its size.
            let answer =
                unsafe { query(self.context, u32::from(port), index, &mut entry, 0, size) };
            return (answer == 0).then_some(GidEntry {
                gid: entry.gid.raw,
                index: index as u8,
                kind: entry.gid_type,
            });
        }
        let mut gid = ibv_gid::default();
        // SAFETY: a live context and a valid struct.
        let answer =
            unsafe { (self.verbs.query_gid)(self.context, port, index as libc::c_int, &mut gid) };
        (answer == 0).then(|| GidEntry {
            gid: gid.raw,
            index: index as u8,
            kind: gid_kind_of_sysfs(&self.name, port, index),
        })
    }

    /// The descriptor of asynchronous events.
    pub fn async_descriptor(&self) -> RawFd {
        // SAFETY: a live context, whose descriptor does not change.
        unsafe { (*self.context).async_fd }
    }

    /// The next asynchronous event, acknowledged; never blocks.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        // SAFETY: zeros are valid for the struct, a union of pointers and a number.
        let mut event: ibv_async_event = unsafe { std::mem::zeroed() };
        // SAFETY: a live context, whose descriptor is non-blocking, and a valid struct.
        if unsafe { (self.verbs.get_async_event)(self.context, &mut event) } != 0 {
            return None;
        }
        let kind = event.event_type;
        let told = match kind {
            sys::IBV_EVENT_QP_FATAL
            | sys::IBV_EVENT_QP_REQ_ERR
            | sys::IBV_EVENT_QP_ACCESS_ERR
            | sys::IBV_EVENT_PATH_MIG_ERR
            | sys::IBV_EVENT_QP_LAST_WQE_REACHED => {
                // SAFETY: for these the queue pair is named, and destroying it waits for the
                // acknowledgement below, so it lives.
                AsyncEvent::Pair(unsafe { (*event.element.qp).qp_num }, kind)
            }
            sys::IBV_EVENT_PORT_ERR => {
                // SAFETY: for this the port's number is named.
                AsyncEvent::Port(unsafe { event.element.port_num } as u8, kind)
            }
            sys::IBV_EVENT_DEVICE_FATAL | sys::IBV_EVENT_CQ_ERR | sys::IBV_EVENT_WQ_FATAL => {
                AsyncEvent::Device(kind)
            }
            other => AsyncEvent::Other(other),
        };
        // SAFETY: the event just given, once.
        unsafe { (self.verbs.ack_async_event)(&mut event) };
        Some(told)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: nothing that was made of them lives (V1). If the library refuses, they leak.
        unsafe {
            if (self.verbs.dealloc_pd)(self.domain) == 0 {
                (self.verbs.close_device)(self.context);
            }
        }
    }
}

/// The type of a GID as the kernel tells it, for libraries that do not.
fn gid_kind_of_sysfs(device: &str, port: u8, index: u32) -> u32 {
    let path = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}");
    match std::fs::read_to_string(path).unwrap_or_default().trim() {
        "RoCE v2" => sys::IBV_GID_TYPE_ROCE_V2,
        "IB/RoCE v1" => sys::IBV_GID_TYPE_ROCE_V1,
        _ => sys::IBV_GID_TYPE_IB,
    }
}
