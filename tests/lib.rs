//! Suites that need a whole Palisade: `body` (what a Body does), `escape` (what it cannot do).
//!
//! `cli` stands here too, but is built by the package `cli`, which alone knows where its `pal` is.
