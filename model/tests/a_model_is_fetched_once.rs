//! The cache: only whole files with the right hash, one fetch at a time.

use kvserve_model::fetch::{CatalogueEntry, FetchError, Source, Stage, fetch_into};
use std::sync::atomic::{AtomicUsize, Ordering};

#[path = "common/temp_folder.rs"]
mod temp_folder;
use temp_folder::TempFolder;

/// Three bytes, `abc`, whose hash is in FIPS 180-2.
const ABC: CatalogueEntry = CatalogueEntry {
    name: "abc",
    file: "abc.gguf",
    bytes: 3,
    sha256: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    package: "no-such-package",
    licence: "none",
};

fn from_file(folder: &TempFolder, bytes: &str) -> Result<std::path::PathBuf, FetchError> {
    let source = folder.path().join("source");
    std::fs::write(&source, bytes).unwrap();
    fetch_into(
        &folder.path().join("cache"),
        &ABC,
        &Source::File(source),
        &mut |_| (),
    )
}

fn cached_names(folder: &TempFolder) -> Vec<String> {
    let listed = std::fs::read_dir(folder.path().join("cache")).unwrap();
    let mut names: Vec<_> = listed
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_right_file_comes_into_the_cache_and_is_not_fetched_again() {
    let folder = TempFolder::new("fetch-right");
    let path = from_file(&folder, "abc").unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"abc");
    assert_eq!(cached_names(&folder), [".lock", "abc.gguf"]);
    // The source is gone and is not needed.
    let gone = Source::File(folder.path().join("gone"));
    assert_eq!(
        fetch_into(&folder.path().join("cache"), &ABC, &gone, &mut |_| ()).unwrap(),
        path
    );
}

#[test]
fn a_wrong_file_leaves_nothing_behind() {
    let folder = TempFolder::new("fetch-wrong");
    assert!(matches!(
        from_file(&folder, "abd"),
        Err(FetchError::Hash { bytes: 3, .. })
    ));
    assert!(matches!(
        from_file(&folder, "ab"),
        Err(FetchError::Hash { bytes: 2, .. })
    ));
    assert!(matches!(
        from_file(&folder, "abcd"),
        Err(FetchError::TooLong { wanted: 3 })
    ));
    assert_eq!(cached_names(&folder), [".lock"]);
    from_file(&folder, "abc").unwrap();
}

#[test]
fn leftovers_and_cut_files_are_replaced() {
    let folder = TempFolder::new("fetch-leftover");
    let cache = folder.path().join("cache");
    std::fs::create_dir_all(&cache).unwrap();
    std::fs::write(cache.join(".abc.gguf.part"), "half of a longer file").unwrap();
    std::fs::write(cache.join("abc.gguf"), "ab").unwrap();
    let path = from_file(&folder, "abc").unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"abc");
}

#[test]
fn only_one_of_many_fetches_writes() {
    let folder = TempFolder::new("fetch-many");
    let source = folder.path().join("source");
    std::fs::write(&source, "abc").unwrap();
    let (cache, writes) = (folder.path().join("cache"), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let from = Source::File(source.clone());
                fetch_into(&cache, &ABC, &from, &mut |progress| {
                    if progress.stage == Stage::Writing {
                        writes.fetch_add(1, Ordering::SeqCst);
                    }
                })
                .unwrap();
            });
        }
    });
    assert_eq!(writes.load(Ordering::SeqCst), 1);
}

#[test]
fn only_web_addresses_are_urls() {
    let folder = TempFolder::new("fetch-url");
    let source = Source::Url("file:///etc/hostname".into());
    let error = fetch_into(folder.path(), &ABC, &source, &mut |_| ()).unwrap_err();
    assert!(matches!(error, FetchError::Url { .. }));
    assert_eq!(
        Source::parse("https://host/x.gguf"),
        Source::Url("https://host/x.gguf".into())
    );
    assert_eq!(Source::parse("x.gguf"), Source::File("x.gguf".into()));
}

#[test]
fn a_url_is_fetched() {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        let _read = stream.read(&mut request).unwrap();
        stream
            .write_all(b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nabc")
            .unwrap();
    });
    let folder = TempFolder::new("fetch-http");
    let source = Source::Url(format!("http://{address}/abc.gguf"));
    let path = fetch_into(folder.path(), &ABC, &source, &mut |_| ()).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), b"abc");
    server.join().unwrap();
}
