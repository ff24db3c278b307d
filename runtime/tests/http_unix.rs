//! HTTP on a Unix socket that only this user may open.

#![allow(clippy::disallowed_types, reason = "a plain test thread")]

mod http_support;

use http_support::{PATIENCE, config};
use kvserve_runtime::http::{Drain, HttpLimits, Response, StatusCode, handler, serve};
use kvserve_runtime::net::UnixListener;
use kvserve_runtime::{Deadline, Nanos};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvserve-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn it_serves_with_mode_600_and_removes_its_file() {
    let folder = Folder::new("unix-serve");
    let path = folder.0.join("admin.sock");
    let drain = Drain::new();
    let (tell, told) = std::sync::mpsc::channel();
    let thread = {
        let (path, drain) = (path.clone(), drain.clone());
        kvserve_runtime::testing::launch(config("unix-test"), move |shard| async move {
            let listener = UnixListener::bind(&path).unwrap();
            tell.send(()).unwrap();
            let app = handler(|request| async move {
                assert_eq!(request.peer.port(), 0);
                Response::json(StatusCode::OK, "{}")
            });
            serve(shard, listener, HttpLimits::default(), app, drain).await
        })
        .unwrap()
    };
    told.recv_timeout(PATIENCE).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let mut socket = UnixStream::connect(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let get = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    socket.write_all(get).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    drain.begin(Deadline::after(Nanos::now(), PATIENCE));
    thread.join().unwrap();
    assert!(!path.exists());
}

#[test]
fn a_stale_file_is_replaced_a_live_one_is_not() {
    let folder = Folder::new("unix-stale");
    let stale = folder.0.join("stale.sock");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    let live = folder.0.join("live.sock");
    let _alive = std::os::unix::net::UnixListener::bind(&live).unwrap();
    let file = folder.0.join("file");
    std::fs::write(&file, b"precious").unwrap();
    let paths = (stale, live.clone(), file.clone());
    let thread = kvserve_runtime::testing::launch(config("unix-test"), move |_| async move {
        assert!(UnixListener::bind(&paths.0).is_ok());
        for path in [&paths.1, &paths.2] {
            let error = UnixListener::bind(path).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::AddrInUse);
        }
    });
    thread.unwrap().join().unwrap();
    assert!(live.exists());
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
}
