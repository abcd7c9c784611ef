//! How a Body is held.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The layers, weakest boundary against a hostile kernel exploit first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layer {
    /// Namespaces, Landlock, seccomp and limits on the host's own root.
    Process,
    /// The same on an image's root.
    Container,
    /// No system calls at all.
    Wasm,
    /// A kernel of its own.
    Microvm,
}

impl Layer {
    /// Every layer there is.
    pub const ALL: [Layer; 4] = [Layer::Process, Layer::Container, Layer::Wasm, Layer::Microvm];

    /// The layer's name on every surface.
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

/// A layer of that name does not exist.
#[derive(Debug, thiserror::Error)]
#[error("there is no layer {0:?}; the layers are process, container, wasm, microvm")]
pub struct UnknownLayer(String);

impl FromStr for Layer {
    type Err = UnknownLayer;
    fn from_str(text: &str) -> Result<Self, UnknownLayer> {
        Layer::ALL.into_iter().find(|layer| layer.name() == text).ok_or_else(|| UnknownLayer(text.to_owned()))
    }
}
