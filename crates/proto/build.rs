//! Compiles the guest's messages: binary protobuf by prost, proto3 JSON by pbjson, no `protoc` needed.

use std::{env, error::Error, path::PathBuf};

use prost_build::Config;

const FILES: [&str; 2] = ["proto/process.proto", "proto/filesystem.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    for file in FILES {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(FILES, ["proto"])?;
    let encoded = prost_encode(&descriptors);
    Config::new()
        .compile_well_known_types()
        .extern_path(".google.protobuf", "::pbjson_types")
        .bytes(["."])
        .compile_fds(descriptors)?;
    pbjson_build::Builder::new()
        .register_descriptors(&encoded)?
        .ignore_unknown_fields()
        .build(&[".process", ".filesystem"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    assert!(out.join("process.serde.rs").exists());
    Ok(())
}

fn prost_encode(set: &protox::prost_reflect::prost_types::FileDescriptorSet) -> Vec<u8> {
    use protox::prost_reflect::prost::Message;
    set.encode_to_vec()
}
