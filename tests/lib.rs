//! Test suites that need a whole Palisade: `body` (what a Body does), `escape` (what it cannot do).
//!
//! The suite `cli` is here, too, but the package `cli` builds it, because only that knows the path of its
//! `pal`.
