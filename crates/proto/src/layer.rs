//! The isolation layers of Bodies.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The layers, ordered by their strength against a kernel exploit, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layer {
    /// Namespaces, Landlock, seccomp and limits, on the host's own root file system.
    Process,
    /// Namespaces, Landlock, seccomp and limits, on the root file system of an image.
    Container,
    /// A WebAssembly sandbox without system calls.
    Wasm,
    /// A kernel of its own under a hypervisor.
    Microvm,
}

impl Layer {
    /// All layers.
    pub const ALL: [Layer; 4] = [Layer::Process, Layer::Container, Layer::Wasm, Layer::Microvm];

    /// The word for it in every output.
    pub fn name(self) -> &'static str {
        match self {
            Layer::Process => "process",
            Layer::Container => "container",
            Layer::Wasm => "wasm",
            Layer::Microvm => "microvm",
        }
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No layer has this name.
#[derive(Debug, thiserror::Error)]
#[error("there is no layer {0:?}; the layers are process, container, wasm, microvm")]
pub struct UnknownLayer(String);

impl FromStr for Layer {
    type Err = UnknownLayer;
    fn from_str(text: &str) -> Result<Self, UnknownLayer> {
        Layer::ALL.into_iter().find(|layer| layer.name() == text).ok_or_else(|| UnknownLayer(text.to_owned()))
    }
}
