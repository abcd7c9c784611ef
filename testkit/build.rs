//! Builds the probe as a static program, and passes its path to the library.
//!
//! A binary cannot be a dependency on stable Rust, so this script builds it, in a target directory of its
//! own, because cargo holds the lock of the outer one.

use std::{
    env,
    error::Error,
    path::{Path, PathBuf},
    process::Command,
};

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("..").canonicalize()?;
    println!("cargo:rerun-if-changed={}", root.join("testkit/probe/src").display());
    println!("cargo:rerun-if-changed={}", root.join("testkit/probe/Cargo.toml").display());
    let target = env::var("TARGET")?;
    let out = target_dir()?.join("probe-program");
    let mut cargo = Command::new(env::var("CARGO")?);
    cargo.current_dir(&root).args([
        "build",
        "--quiet",
        "--package",
        "probe",
        "--target",
        &target,
        "--target-dir",
    ]);
    cargo.arg(&out);
    // Variables that cargo sets for this script describe this crate, not the probe.
    for (name, _) in env::vars()
        .filter(|(name, _)| name.starts_with("CARGO_") && name != "CARGO_HOME" || name == "RUSTFLAGS")
    {
        cargo.env_remove(name);
    }
    if !cargo.status()?.success() {
        return Err("cannot build the probe".into());
    }
    println!("cargo:rustc-env=PROBE={}", out.join(&target).join("debug/probe").display());
    Ok(())
}

/// The target directory of this build: four directories above `OUT_DIR`.
fn target_dir() -> Result<PathBuf, Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    Ok(out.ancestors().nth(4).map(Path::to_owned).ok_or("OUT_DIR is not in a target directory")?)
}
