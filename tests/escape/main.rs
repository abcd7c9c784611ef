//! What a Body cannot do.
