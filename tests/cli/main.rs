//! `pal` as a person and a program meet it: exit codes, pipes, terminals, signals, bad input.
//!
//! Each test runs as whoever runs the suite and again as an ordinary user, and leaves nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod bad_input;
mod kill;
mod origin;
mod pal;
mod pipes;
mod terminal;
mod together;

/// Makes of a function two tests.
macro_rules! cli_test {
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
pub(crate) use cli_test;
