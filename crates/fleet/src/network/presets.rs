//! The presets: lists of rules with a name, each rule with its reason.

use std::{fmt, str::FromStr};

use proto::{Failure, Kind, egress::EgressRule};

use super::remotes::remote_rules;

/// Mirrors of distributions, each with the reason why it is allowed. Package managers check the signatures of packages
/// that they fetch over plain http.
const MIRRORS: &[(&str, &str)] = &[
    ("deb.debian.org:443", "apt"),
    ("deb.debian.org:80+plain", "apt, whose packages are signed"),
    ("security.debian.org:443", "apt"),
    ("security.debian.org:80+plain", "apt, whose packages are signed"),
    ("archive.ubuntu.com:443", "apt of Ubuntu"),
    ("archive.ubuntu.com:80+plain", "apt of Ubuntu, whose packages are signed"),
    ("security.ubuntu.com:443", "apt of Ubuntu"),
    ("security.ubuntu.com:80+plain", "apt of Ubuntu, whose packages are signed"),
    ("ports.ubuntu.com:443", "apt of Ubuntu on other architectures"),
    ("ports.ubuntu.com:80+plain", "apt of Ubuntu on other architectures, whose packages are signed"),
    ("dl-cdn.alpinelinux.org:443", "apk"),
    ("dl-cdn.alpinelinux.org:80+plain", "apk, whose packages are signed"),
];

/// The APIs of models.
const MODELS: &[(&str, &str)] = &[
    ("api.anthropic.com:443", "the API of Anthropic"),
    ("api.openai.com:443", "the API of OpenAI"),
    ("generativelanguage.googleapis.com:443", "the Gemini API of Google"),
    ("api.groq.com:443", "the API of Groq"),
    ("openrouter.ai:443", "the API of OpenRouter"),
    ("api.mistral.ai:443", "the API of Mistral"),
    ("api.deepseek.com:443", "the API of DeepSeek"),
    ("api.x.ai:443", "the API of xAI"),
    ("api.together.xyz:443", "the API of Together"),
    ("api.fireworks.ai:443", "the API of Fireworks"),
    ("api.cohere.com:443", "the API of Cohere"),
    ("api.cerebras.ai:443", "the API of Cerebras"),
];

/// Reading the web. A question can carry what the Body knows, so this is as open as `open` for what leaves.
const RESEARCH: &[(&str, &str)] = &[
    ("GET,HEAD *:443", "the preset `research`: pages, which are asked for and never changed"),
    ("*:80+plain", "the preset `research`: pages without TLS"),
];

/// A list of rules with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Preset {
    /// No rule: the Body reaches only itself.
    Closed,
    /// Package registries and mirrors of distributions.
    Registries,
    /// APIs of models.
    Models,
    /// The hosts of the repository's remotes.
    Git,
    /// Every public name, of which it may only ask: GET and HEAD.
    Research,
    /// Every public name and address.
    Open,
}

impl Preset {
    /// All presets.
    pub const ALL: [Self; 6] =
        [Self::Closed, Self::Registries, Self::Models, Self::Git, Self::Research, Self::Open];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Registries => "registries",
            Self::Models => "models",
            Self::Git => "git",
            Self::Research => "research",
            Self::Open => "open",
        }
    }

    /// Its rules. `remotes` has the addresses of the repository's remotes.
    pub(super) fn rules(self, remotes: &[String]) -> Result<Vec<EgressRule>, Failure> {
        match self {
            Self::Closed => Ok(Vec::new()),
            Self::Registries => {
                let registries = workspace::registries();
                let registries =
                    registries.into_iter().map(|to| EgressRule::allow(to).because("a package registry"));
                Ok(registries.chain(listed(MIRRORS)).collect())
            }
            Self::Models => Ok(listed(MODELS).collect()),
            Self::Git => remote_rules(remotes),
            Self::Research => Ok(listed(RESEARCH).collect()),
            Self::Open => Ok(vec![EgressRule::allow("*:*").because("the preset `open`")]),
        }
    }
}

fn listed(list: &'static [(&str, &str)]) -> impl Iterator<Item = EgressRule> {
    list.iter().map(|(to, why)| EgressRule::allow(*to).because(*why))
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Preset {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        Self::ALL.into_iter().find(|preset| preset.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Failure::new(Kind::Usage, format!("there is no network preset {:?}", proto::text::visible(text)))
                .hint(format!("the presets are {names}; to allow one host: --allow HOST:PORT"))
        })
    }
}

/// The rules that the commands of a build have by default: package registries and mirrors of distributions.
pub fn registries() -> Vec<String> {
    let mirrors = MIRRORS.iter().map(|(rule, _)| (*rule).to_owned());
    workspace::registries().into_iter().map(str::to_owned).chain(mirrors).collect()
}

#[cfg(test)]
mod tests {
    use proto::egress::Policy;

    use super::*;

    #[test]
    fn every_preset_is_a_policy_with_reasons() {
        let remotes = ["git@git.example.org:team/app.git".to_owned()];
        for preset in Preset::ALL {
            let rules = preset.rules(&remotes).unwrap();
            Policy::new(&rules).unwrap();
            assert_eq!(rules.is_empty(), preset == Preset::Closed, "{preset}");
            assert!(rules.iter().all(|rule| rule.why.is_some()), "{preset}");
            assert_eq!(preset.name().parse::<Preset>().unwrap(), preset);
            let wide = rules.iter().any(|rule| rule.to.contains('*') || rule.to.contains("private"));
            let is_wide = matches!(preset, Preset::Open | Preset::Research);
            assert_eq!(wide, is_wide, "{preset}: nothing inside, and no whole domain");
        }
        assert!("searching".parse::<Preset>().is_err() && "Open".parse::<Preset>().is_err());
    }

    #[test]
    fn the_registries_name_what_package_managers_use() {
        for rule in
            ["pypi.org:443", "registry.npmjs.org:443", "index.crates.io:443", "deb.debian.org:80+plain"]
        {
            assert!(registries().iter().any(|known| known == rule), "{rule}");
        }
        assert!(
            MIRRORS.iter().all(|(rule, why)| !rule.contains("plain") || why.contains("signed")),
            "plain http needs a reason"
        );
    }
}
