//! Stops one thread of a child process and lets the others run, as a shard or an engine that is
//! wedged in a loop or a driver call would.

use std::fs;

/// A thread held still; dropping it lets the thread go on. To be dropped on the thread that made
/// it: the kernel knows the tracer by thread.
pub struct StoppedThread {
    tid: i32,
}

impl StoppedThread {
    /// Stops the thread of `pid` whose name begins with `name`. `None` if the kernel forbids it.
    pub fn of(pid: i32, name: &str) -> Option<StoppedThread> {
        let tid = fs::read_dir(format!("/proc/{pid}/task"))
            .expect("threads of the process")
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
            .find(|tid| {
                let path = format!("/proc/{pid}/task/{tid}/comm");
                fs::read_to_string(path).is_ok_and(|comm| comm.starts_with(name))
            })
            .unwrap_or_else(|| panic!("process {pid} has no thread called {name}..."));
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: ptrace on a thread of our own child; no memory of ours is given.
        let held = unsafe {
            libc::ptrace(libc::PTRACE_SEIZE, tid, none, none) == 0
                && libc::ptrace(libc::PTRACE_INTERRUPT, tid, none, none) == 0
                && libc::waitpid(tid, std::ptr::null_mut(), libc::__WALL) == tid
        };
        held.then_some(StoppedThread { tid })
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: as above; an error means that the thread has ended.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.tid, none, none) };
    }
}
