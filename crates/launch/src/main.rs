//! `pal-launch`, as a program of its own.

use std::process::ExitCode;

fn main() -> ExitCode {
    launch::main(std::env::args_os())
}
