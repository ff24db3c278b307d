//! The layouts declared by hand are those of the C header, where the machine has one.
//!
//! Compile-time assertions hold the layouts still; this shows that they are the right ones. It
//! needs `infiniband/verbs.h` (the package `libibverbs-dev`) and a C compiler, and says so when it
//! has to pass without.

use rdma_core_sys::LAYOUTS;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

const HEADER: &str = "/usr/include/infiniband/verbs.h";

/// Structs that end early here: their size in C is larger.
const ENDS_EARLY: [&str; 3] = ["ibv_context", "ibv_cq", "ibv_qp"];

#[test]
fn every_size_and_offset_is_that_of_the_header() {
    if !Path::new(HEADER).exists() || Command::new("cc").arg("--version").output().is_err() {
        eprintln!("SKIPPED: no {HEADER} or no C compiler (install libibverbs-dev and gcc)");
        return;
    }
    let mut source = String::from(
        "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n",
    );
    let mut wanted = String::new();
    for (name, size, members) in LAYOUTS {
        let kind = if *name == "ibv_gid" {
            "union"
        } else {
            "struct"
        };
        if !ENDS_EARLY.contains(name) {
            let _ = writeln!(source, "printf(\"{name} %zu\\n\", sizeof({kind} {name}));");
            let _ = writeln!(wanted, "{name} {size}");
        }
        for (member, offset) in *members {
            let _ = writeln!(
                source,
                "printf(\"{name}.{member} %zu\\n\", offsetof({kind} {name}, {member}));"
            );
            let _ = writeln!(wanted, "{name}.{member} {offset}");
        }
    }
    source.push_str("return 0; }\n");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("verbs-header");
    std::fs::create_dir_all(&folder).expect("a folder for the C program");
    let (file, program) = (folder.join("layout.c"), folder.join("layout"));
    std::fs::write(&file, source).expect("the C program is written");
    let built = Command::new("cc")
        .arg(&file)
        .arg("-o")
        .arg(&program)
        .output()
        .expect("cc runs");
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let ran = Command::new(&program).output().expect("the C program runs");
    let found = String::from_utf8(ran.stdout).expect("text");
    for (wanted, found) in wanted.lines().zip(found.lines()) {
        assert_eq!(wanted, found, "this crate, then the header");
    }
    assert_eq!(wanted.lines().count(), found.lines().count());
}
