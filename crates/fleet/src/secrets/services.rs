//! Known services: their hosts, the parts of a request in which they take a key, and the variables in which programs look
//! for it.

use proto::{Failure, Kind, egress::SecretFields};

/// A service whose secrets need no further description.
#[derive(Debug, Clone, Copy)]
pub struct SecretService {
    /// Its name, for `--for`.
    pub name: &'static str,
    /// The hosts to which its secret may go.
    pub hosts: &'static [&'static str],
    headers: &'static [&'static str],
    basic: bool,
    query: bool,
    sigv4: bool,
    /// The variables in which programs look for the secret.
    pub env: &'static [&'static str],
    /// Whether git asks for the secret.
    pub git: bool,
    /// The beginning of its keys, which some programs check.
    pub prefix: Option<&'static str>,
}

/// A service that takes its key in the header `authorization` of one host.
const fn bearer(
    name: &'static str,
    hosts: &'static [&'static str],
    env: &'static [&'static str],
    prefix: Option<&'static str>,
) -> SecretService {
    SecretService {
        name,
        hosts,
        headers: &["authorization"],
        basic: false,
        query: false,
        sigv4: false,
        env,
        git: false,
        prefix,
    }
}

/// All services.
pub static SERVICES: &[SecretService] = &[
    SecretService {
        headers: &["x-api-key", "authorization"],
        ..bearer("anthropic", &["api.anthropic.com"], &["ANTHROPIC_API_KEY"], Some("sk-ant-"))
    },
    bearer("openai", &["api.openai.com"], &["OPENAI_API_KEY", "CODEX_API_KEY"], Some("sk-")),
    SecretService {
        headers: &["x-goog-api-key"],
        query: true,
        ..bearer("gemini", &["generativelanguage.googleapis.com"], &["GEMINI_API_KEY"], None)
    },
    bearer("openrouter", &["openrouter.ai"], &["OPENROUTER_API_KEY"], Some("sk-or-")),
    bearer("groq", &["api.groq.com"], &["GROQ_API_KEY"], Some("gsk_")),
    bearer("mistral", &["api.mistral.ai"], &["MISTRAL_API_KEY"], None),
    bearer("deepseek", &["api.deepseek.com"], &["DEEPSEEK_API_KEY"], Some("sk-")),
    bearer("xai", &["api.x.ai"], &["XAI_API_KEY"], Some("xai-")),
    bearer("huggingface", &["huggingface.co"], &["HF_TOKEN"], Some("hf_")),
    SecretService {
        basic: true,
        git: true,
        ..bearer(
            "github",
            &["github.com", "api.github.com", "uploads.github.com", "raw.githubusercontent.com"],
            &["GH_TOKEN", "GITHUB_TOKEN"],
            Some("ghp_"),
        )
    },
    SecretService {
        headers: &["private-token", "authorization"],
        basic: true,
        git: true,
        ..bearer("gitlab", &["gitlab.com"], &["GITLAB_TOKEN"], Some("glpat-"))
    },
    bearer(
        "npm",
        &["registry.npmjs.org"],
        &["NPM_TOKEN", "npm_config_//registry.npmjs.org/:_authToken"],
        Some("npm_"),
    ),
    SecretService {
        headers: &[],
        basic: true,
        ..bearer("pypi", &["upload.pypi.org"], &["TWINE_PASSWORD", "UV_PUBLISH_TOKEN"], Some("pypi-"))
    },
    bearer("crates", &["crates.io"], &["CARGO_REGISTRY_TOKEN"], None),
    // Every service of AWS has names of its own; a signature is worth nothing without the key.
    SecretService {
        headers: &[],
        sigv4: true,
        ..bearer("aws", &["**.amazonaws.com"], &["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"], Some("AKIA"))
    },
];

impl SecretService {
    /// Finds a service by its name.
    pub fn find(name: &str) -> Result<&'static Self, Failure> {
        SERVICES.iter().find(|service| service.name == name).ok_or_else(|| {
            let names: Vec<&str> = SERVICES.iter().map(|service| service.name).collect();
            Failure::new(Kind::Usage, format!("there is no known service {:?}", proto::text::visible(name)))
                .hint(format!("the services are {}", names.join(", ")))
                .hint("for another one: pal secret set NAME --to HOST --header NAME --env VARIABLE")
        })
    }

    /// The parts of a request in which it takes its secret.
    pub fn fields(&self) -> SecretFields {
        let headers = self.headers.iter().map(|name| (*name).to_owned()).collect();
        SecretFields { headers, basic: self.basic, query: self.query, body: false, sigv4: self.sigv4 }
    }
}

#[cfg(test)]
mod tests {
    use proto::egress::{Policy, is_placeholder_byte};

    use super::*;

    #[test]
    fn every_service_is_whole() {
        for service in SERVICES {
            assert!(std::ptr::eq(SecretService::find(service.name).unwrap(), service));
            Policy::default().inspecting(service.hosts).unwrap();
            assert!(!service.hosts.is_empty() && !service.env.is_empty(), "{}", service.name);
            let is_whole = service.hosts.iter().any(|host| host.contains('*'));
            assert_eq!(is_whole, service.sigv4, "{}: no whole domain", service.name);
            assert_ne!(service.fields(), SecretFields::default(), "{}", service.name);
            assert!(service.prefix.unwrap_or_default().bytes().all(is_placeholder_byte));
        }
        let unknown = SecretService::find("githup").unwrap_err();
        assert!(unknown.hints[0].contains("github"), "{unknown:?}");
    }
}
