//! Has the linker put side by side what `pal run` executes.
//!
//! A page of a program costs whoever runs it first a fault, and its end as much again; a run starts three processes out
//! of this one file. As the linker finds them, the 2,000 functions it needs are spread over 20 MB. `order.txt` names
//! them; `bench/order` writes it. Names that are not in the build are passed over, so an old list does no harm.

use std::env;

const LIST: &str = "order.txt";

fn main() {
    println!("cargo:rerun-if-changed={LIST}");
    if is("PROFILE", "release") && links_with_lld() {
        let dir = env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
        for word in [format!("--symbol-ordering-file={dir}/{LIST}"), "--no-warn-symbol-ordering".into()] {
            println!("cargo:rustc-link-arg-bins=-Xlinker");
            println!("cargo:rustc-link-arg-bins={word}");
        }
    }
}

/// Only lld takes such a list. Rust brings it and links with it on this target, unless somebody chose another.
fn links_with_lld() -> bool {
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    let chosen = ["fuse-ld", "linker", "self-contained"].iter().any(|word| flags.contains(word));
    is("TARGET", "x86_64-unknown-linux-gnu") && env::var_os("RUSTC_LINKER").is_none() && !chosen
}

fn is(name: &str, value: &str) -> bool {
    env::var(name).is_ok_and(|found| found == value)
}
