//! Has the linker put side by side what `pal run` executes.
//!
//! A page of a program costs whoever runs it first a fault, and its end as much again; a run starts three processes out
//! of this one file. As the linker finds them, the 2,000 functions it needs are spread over 20 MB. `order.txt` names
//! them; `bench/order` writes it. Names that are not in the build are passed over, so an old list does no harm.

use std::{
    env,
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

const LIST: &str = "order.txt";

fn main() {
    println!("cargo:rerun-if-changed={LIST}");
    let list = Path::new(&variable("CARGO_MANIFEST_DIR")).join(LIST);
    let words = [
        format!("--symbol-ordering-file={}", list.display()),
        "--no-warn-symbol-ordering".into(),
        // Written in one piece, it lies in the page cache in large ones, and a run has fewer to go through.
        "--no-mmap-output-file".into(),
    ];
    let args: Vec<String> = words.into_iter().flat_map(|word| ["-Xlinker".to_owned(), word]).collect();
    if variable("PROFILE") == "release" && links_with(&args) {
        args.iter().for_each(|arg| println!("cargo:rustc-link-arg-bins={arg}"));
    }
}

/// Only lld takes such a list. Rust's own builds bring it and link with it on some targets, others do not, and people
/// choose linkers: so it is tried.
fn links_with(args: &[String]) -> bool {
    let flags = variable("CARGO_ENCODED_RUSTFLAGS");
    let mut rustc = Command::new(variable("RUSTC"));
    rustc.args(flags.split('\x1f').filter(|flag| !flag.is_empty())).args(["--target", &variable("TARGET")]);
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        rustc.arg(format!("-Clinker={linker}"));
    }
    rustc.args(args.iter().map(|arg| format!("-Clink-arg={arg}")));
    rustc.arg("-o").arg(Path::new(&variable("OUT_DIR")).join("tried")).arg("-");
    let Ok(mut tried) = rustc.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
    else {
        return false;
    };
    // Dropped, it is all there is to compile.
    let written = tried.stdin.take().map(|mut program| program.write_all(b"fn main() {}"));
    let ended = tried.wait();
    matches!(written, Some(Ok(()))) && ended.is_ok_and(|status| status.success())
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_default()
}
