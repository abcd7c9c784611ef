//! envd's messages, generated from `proto/*.proto`: binary protobuf and proto3 JSON.
#![allow(missing_docs, clippy::all, clippy::unwrap_used, reason = "generated")]

/// `process.Process`.
pub mod process {
    include!(concat!(env!("OUT_DIR"), "/process.rs"));
    include!(concat!(env!("OUT_DIR"), "/process.serde.rs"));
}

/// `filesystem.Filesystem`.
pub mod filesystem {
    include!(concat!(env!("OUT_DIR"), "/filesystem.rs"));
    include!(concat!(env!("OUT_DIR"), "/filesystem.serde.rs"));
}
