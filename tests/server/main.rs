//! `pal serve` as a program meets it: over HTTP, with real Bodies.
//!
//! Each test runs as whoever runs the suite and again as an ordinary user, and leaves nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod bad_input;
mod client;
mod crash;
mod life;
mod limits;
mod native;
#[path = "../cli/pal.rs"]
#[allow(dead_code, reason = "shared with the suite of the command line")]
mod pal;
mod ports;
mod server;
mod start;
mod terminal;

/// Makes of a function two tests.
macro_rules! server_test {
    ($(#[doc = $doc:literal])* fn $name:ident($pal:ident) $body:block) => {
        $(#[doc = $doc])*
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            fn test($pal: &crate::pal::Pal) $body

            #[test]
            fn as_is() {
                crate::pal::check(test);
            }

            #[test]
            fn as_user() {
                crate::pal::program();
                testkit::run_as_user(concat!(module_path!(), "::as_is"));
            }
        }
    };
}
pub(crate) use server_test;
