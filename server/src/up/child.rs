//! One child process: started, watched, started again with a back-off.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The pause before the first restart; it doubles up to [`BACK_OFF_MAX`].
const BACK_OFF_MIN: Duration = Duration::from_millis(50);
/// The longest pause before a restart.
const BACK_OFF_MAX: Duration = Duration::from_secs(5);
/// A child that lived this long starts over with the shortest pause.
const HEALTHY_AFTER: Duration = Duration::from_secs(10);

/// What to run.
#[derive(Clone, Debug)]
pub struct ChildSpec {
    /// Its node id.
    pub name: String,
    /// Arguments of our own binary.
    pub args: Vec<String>,
}

/// A supervised process.
pub struct Child {
    spec: ChildSpec,
    process: Option<std::process::Child>,
    started: Instant,
    start_at: Instant,
    back_off: Duration,
    deaths: u32,
}

impl Child {
    /// Not started yet; the first [`Child::tend`] does it.
    pub fn new(spec: ChildSpec) -> Self {
        let now = Instant::now();
        Child {
            spec,
            process: None,
            started: now,
            start_at: now,
            back_off: Duration::ZERO,
            deaths: 0,
        }
    }

    /// Its node id.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// How long it waits before its next start.
    pub fn back_off(&self) -> Duration {
        self.back_off
    }

    /// How often it has ended.
    pub fn deaths(&self) -> u32 {
        self.deaths
    }

    /// Starts it when due, notices its end. Says how it ended, once.
    pub fn tend(&mut self, now: Instant) -> Option<String> {
        match &mut self.process {
            None if now >= self.start_at => match self.spawn() {
                Ok(process) => {
                    self.process = Some(process);
                    self.started = now;
                    None
                }
                Err(error) => Some(self.ended(now, format!("it could not be started: {error}"))),
            },
            None => None,
            Some(process) => match process.try_wait() {
                Ok(None) => None,
                Ok(Some(status)) => {
                    self.process = None;
                    Some(self.ended(now, describe(status)))
                }
                Err(error) => {
                    self.process = None;
                    Some(self.ended(now, format!("it cannot be waited for: {error}")))
                }
            },
        }
    }

    fn ended(&mut self, now: Instant, how: String) -> String {
        self.deaths += 1;
        self.back_off = if now.duration_since(self.started) >= HEALTHY_AFTER {
            BACK_OFF_MIN
        } else {
            (self.back_off * 2).clamp(BACK_OFF_MIN, BACK_OFF_MAX)
        };
        self.start_at = now + self.back_off;
        how
    }

    fn spawn(&self) -> std::io::Result<std::process::Child> {
        let parent = std::process::id();
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(&self.spec.args)
            .stdin(Stdio::null())
            // A group of its own: Ctrl-C reaches the supervisor alone, which drains in order.
            .process_group(0);
        // SAFETY: only async-signal-safe calls between fork and exec: prctl and getppid.
        unsafe {
            command.pre_exec(move || {
                // The kernel tells the child when its supervisor dies, however it dies.
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
                if libc::getppid() as u32 != parent {
                    return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
                }
                Ok(())
            });
        }
        command.spawn()
    }

    /// Whether it runs.
    pub fn running(&mut self) -> bool {
        match &mut self.process {
            Some(process) => matches!(process.try_wait(), Ok(None)),
            None => false,
        }
    }

    /// Tells it to drain.
    pub fn terminate(&mut self) {
        if let Some(process) = &self.process {
            // SAFETY: a signal to a child that has not been waited for, so the id is still its.
            // A frozen child must wake up to hear it.
            unsafe {
                libc::kill(process.id() as libc::pid_t, libc::SIGTERM);
                libc::kill(process.id() as libc::pid_t, libc::SIGCONT);
            }
        }
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            // An error means that it has ended already.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown end".into(),
    }
}
