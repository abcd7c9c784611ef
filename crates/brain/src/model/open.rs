//! Addresses become models.

use std::sync::Arc;

use super::{
    ApiKey, HttpModel, HttpOptions, Model, ModelAddress,
    http::HttpModelError,
    scripted::{Script, ScriptError, ScriptedModel},
};

/// Why an address does not become a model.
#[derive(Debug, thiserror::Error)]
pub enum OpenModelError {
    /// The script cannot be used.
    #[error("cannot use {file} as a scripted model")]
    Script {
        /// The path.
        file: String,
        /// The reason.
        #[source]
        source: ScriptError,
    },
    /// The endpoint belongs to a vendor that demands a key.
    #[error("{0} needs a key")]
    NoKey(String),
    /// The client cannot be made.
    #[error("cannot make a client for {address}")]
    Client {
        /// The address.
        address: String,
        /// The reason.
        #[source]
        source: HttpModelError,
    },
}

/// Opens the model at an address. A script is read here; an endpoint is not asked before the first answer.
pub fn open(
    address: &ModelAddress,
    key: Option<ApiKey>,
    options: HttpOptions,
) -> Result<Arc<dyn Model>, OpenModelError> {
    if let ModelAddress::Script { file } = address {
        let failed = |source| OpenModelError::Script { file: file.display().to_string(), source };
        let script = Script::open(file).map_err(failed)?;
        return Ok(Arc::new(ScriptedModel::new(script, file.clone(), options.retry)));
    }
    if key.is_none() && address.is_vendor() {
        return Err(OpenModelError::NoKey(address.to_string()));
    }
    let failed = |source| OpenModelError::Client { address: address.to_string(), source };
    Ok(Arc::new(HttpModel::new(address.clone(), key, options).map_err(failed)?))
}
