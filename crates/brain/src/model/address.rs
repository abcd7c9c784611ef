//! Addresses of models: `anthropic:NAME`, `openai:NAME`, `openai-responses:NAME`, `NAME@URL[#WIRE]`, `script:FILE`.

use std::{fmt, path::PathBuf, str::FromStr};

use serde::{Deserialize, Serialize};

const ANTHROPIC: &str = "https://api.anthropic.com";
const OPENAI: &str = "https://api.openai.com/v1";
const FORMS: &str = "anthropic:NAME, openai:NAME, openai-responses:NAME, NAME@URL, NAME@URL#anthropic, \
                     NAME@URL#responses or script:FILE";

/// A wire format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wire {
    /// Anthropic Messages.
    Anthropic,
    /// OpenAI Chat Completions, which most servers speak.
    Chat,
    /// OpenAI Responses.
    Responses,
    /// No wire: the scripted model in this process.
    Script,
}

impl Wire {
    /// The name as it stands after `#` in an address.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Anthropic => "anthropic",
            Self::Chat => "chat",
            Self::Responses => "responses",
            Self::Script => "script",
        }
    }
}

/// The address of a model.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ModelAddress {
    /// A model behind an HTTP endpoint.
    Http {
        /// The wire format that the endpoint speaks.
        wire: Wire,
        /// The name of the model at its endpoint.
        model: String,
        /// The base URL, without a slash at the end.
        base: String,
    },
    /// A scripted model.
    Script {
        /// The file of the script.
        file: PathBuf,
    },
}

/// Why a text is no address of a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no address of a model: {reason}")]
pub struct ModelAddressError {
    text: String,
    reason: String,
}

impl ModelAddress {
    /// The wire format.
    pub fn wire(&self) -> Wire {
        match self {
            Self::Http { wire, .. } => *wire,
            Self::Script { .. } => Wire::Script,
        }
    }

    /// The name of the model: what events and prices call it.
    pub fn model(&self) -> &str {
        match self {
            Self::Http { model, .. } => model,
            Self::Script { .. } => "script",
        }
    }

    /// Whether the endpoint is the vendor's own, which needs a key.
    pub fn is_vendor(&self) -> bool {
        matches!(self, Self::Http { base, .. } if base == ANTHROPIC || base == OPENAI)
    }

    /// The URL to which a request goes; none for a script.
    pub fn endpoint(&self) -> Option<String> {
        let Self::Http { wire, base, .. } = self else { return None };
        Some(match wire {
            Wire::Anthropic => format!("{}/v1/messages", base.strip_suffix("/v1").unwrap_or(base)),
            Wire::Responses => format!("{}/responses", with_version(base)),
            Wire::Chat | Wire::Script => format!("{}/chat/completions", with_version(base)),
        })
    }
}

/// A base URL that is only a host gets the path `/v1`, as servers of the OpenAI formats have it.
fn with_version(base: &str) -> String {
    let host = base.split_once("://").map_or(base, |(_, rest)| rest);
    if host.contains('/') { base.to_owned() } else { format!("{base}/v1") }
}

impl FromStr for ModelAddress {
    type Err = ModelAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).map_err(|reason| ModelAddressError { text: text.to_owned(), reason })
    }
}

fn parse(text: &str) -> Result<ModelAddress, String> {
    if let Some(file) = text.strip_prefix("script:") {
        return if file.is_empty() {
            Err("the path of the script is missing".to_owned())
        } else {
            Ok(ModelAddress::Script { file: file.into() })
        };
    }
    let url = ["@http://", "@https://"].iter().filter_map(|mark| text.find(mark)).min();
    let (wire, model, base) = match url {
        Some(at) => parse_url(&text[at + 1..]).map(|(wire, base)| (wire, &text[..at], base))?,
        None => {
            let (vendor, model) = text.split_once(':').ok_or_else(|| format!("write {FORMS}"))?;
            let (wire, base) = match vendor {
                "anthropic" => (Wire::Anthropic, ANTHROPIC),
                "openai" => (Wire::Chat, OPENAI),
                "openai-responses" => (Wire::Responses, OPENAI),
                _ => return Err(format!("`{vendor}` is no known vendor; write {FORMS}")),
            };
            (wire, model, base.to_owned())
        }
    };
    if model.is_empty() || model.chars().any(|letter| letter.is_whitespace() || letter.is_control()) {
        return Err("the name of the model is empty or has spaces".to_owned());
    }
    Ok(ModelAddress::Http { wire, model: model.to_owned(), base })
}

fn parse_url(text: &str) -> Result<(Wire, String), String> {
    let (base, wire) = match text.split_once('#') {
        None | Some((_, "chat")) => (text.split('#').next().unwrap_or(text), Wire::Chat),
        Some((base, "anthropic")) => (base, Wire::Anthropic),
        Some((base, "responses")) => (base, Wire::Responses),
        Some((_, other)) => {
            return Err(format!("`#{other}` is no wire format; there are #chat, #anthropic and #responses"));
        }
    };
    let url = reqwest::Url::parse(base).map_err(|error| format!("its URL is invalid: {error}"))?;
    if url.host_str().is_none_or(str::is_empty) {
        return Err("its URL has no host".to_owned());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("a key does not belong into a URL".to_owned());
    }
    if url.query().is_some() {
        return Err("its URL has a query".to_owned());
    }
    Ok((wire, base.trim_end_matches('/').to_owned()))
}

impl fmt::Display for ModelAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Script { file } => write!(f, "script:{}", file.display()),
            Self::Http { wire: Wire::Anthropic, model, base } if base == ANTHROPIC => {
                write!(f, "anthropic:{model}")
            }
            Self::Http { wire: Wire::Chat, model, base } if base == OPENAI => write!(f, "openai:{model}"),
            Self::Http { wire: Wire::Responses, model, base } if base == OPENAI => {
                write!(f, "openai-responses:{model}")
            }
            Self::Http { wire: Wire::Chat, model, base } => write!(f, "{model}@{base}"),
            Self::Http { wire, model, base } => write!(f, "{model}@{base}#{}", wire.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_names_wire_model_and_endpoint() {
        let cases = [
            ("anthropic:claude-x", Wire::Anthropic, "claude-x", "https://api.anthropic.com/v1/messages"),
            ("openai:gpt-x", Wire::Chat, "gpt-x", "https://api.openai.com/v1/chat/completions"),
            ("openai-responses:gpt-x", Wire::Responses, "gpt-x", "https://api.openai.com/v1/responses"),
            (
                "llama3:8b@http://127.0.0.1:11434",
                Wire::Chat,
                "llama3:8b",
                "http://127.0.0.1:11434/v1/chat/completions",
            ),
            (
                "a/b@https://openrouter.ai/api/v1/",
                Wire::Chat,
                "a/b",
                "https://openrouter.ai/api/v1/chat/completions",
            ),
            ("m@20@https://h.example#anthropic", Wire::Anthropic, "m@20", "https://h.example/v1/messages"),
            ("m@http://h:1/v1#anthropic", Wire::Anthropic, "m", "http://h:1/v1/messages"),
            ("m@http://h:1#responses", Wire::Responses, "m", "http://h:1/v1/responses"),
            ("m@http://h:1/x#chat", Wire::Chat, "m", "http://h:1/x/chat/completions"),
        ];
        for (text, wire, model, endpoint) in cases {
            let address: ModelAddress = text.parse().unwrap();
            assert_eq!((address.wire(), address.model()), (wire, model), "{text}");
            assert_eq!(address.endpoint().as_deref(), Some(endpoint), "{text}");
            assert_eq!(address.to_string().parse::<ModelAddress>().unwrap(), address, "{text}");
        }
        let script: ModelAddress = "script:a b/c.toml".parse().unwrap();
        assert_eq!(script, ModelAddress::Script { file: "a b/c.toml".into() });
        assert_eq!((script.to_string().as_str(), script.endpoint()), ("script:a b/c.toml", None));
    }

    #[test]
    fn a_wrong_address_is_refused_with_its_reason() {
        let cases = [
            ("", "anthropic:NAME"),
            ("gpt-5", "anthropic:NAME"),
            ("mistral:x", "no known vendor"),
            ("anthropic:", "empty"),
            ("openai:a b", "spaces"),
            ("script:", "path of the script"),
            ("m@http://", "URL"),
            ("m@http://u:p@h", "key"),
            ("m@http://h?a=b", "query"),
            ("m@http://h#grpc", "no wire format"),
            ("@http://h", "empty"),
        ];
        for (text, reason) in cases {
            let error = text.parse::<ModelAddress>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
