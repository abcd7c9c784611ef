//! Grants in the spec of a Body: placeholders, the variables that hold them, git's helper, and rules for the hosts.
//!
//! Invariant: each grant has a placeholder of its own, which no other Body has but the forks of this one.
//! Invariant: a variable or a rule of the caller wins over one of a secret.

use std::collections::BTreeMap;

use proto::{
    Failure, Kind, Spec,
    egress::{EgressRule, PLACEHOLDER_MARK, Policy, RuleAction, SECRETS_MAX},
    spec::{Egress, SecretGrant},
};

use super::{SecretRecord, ssh};

/// The variables by which git gets settings.
const GIT_COUNT: &str = "GIT_CONFIG_COUNT";
const GIT_PREFIX: &str = "GIT_CONFIG_";
/// Most of git's settings that are moved when one is removed.
const GIT_SETTINGS_MAX: usize = 1024;

/// A new placeholder.
fn placeholder(record: &SecretRecord) -> Result<String, Failure> {
    let random: [u8; 26] = sys::random::bytes().map_err(|error| {
        Failure::new(Kind::Host, "cannot read random bytes from the kernel").because(error)
    })?;
    let prefix = record.prefix.as_deref().unwrap_or_default();
    Ok(format!("{prefix}{PLACEHOLDER_MARK}{}", proto::base32::encode(&random)))
}

/// Lets a Body use a secret. A Body that may use it already keeps its placeholder.
pub(crate) fn add_grant(
    egress: &mut Egress,
    env: &mut BTreeMap<String, String>,
    record: &SecretRecord,
) -> Result<(), Failure> {
    let placeholder = match egress.secrets.iter().find(|grant| grant.name == record.name) {
        Some(grant) => grant.placeholder.clone(),
        None if egress.secrets.len() >= SECRETS_MAX => {
            return Err(Failure::new(Kind::Limit, format!("a Body may use {SECRETS_MAX} secrets"))
                .hint("revoke one that it does not need: pal secret revoke BODY NAME"));
        }
        None => {
            let placeholder = placeholder(record)?;
            egress.secrets.push(SecretGrant { name: record.name.clone(), placeholder: placeholder.clone() });
            placeholder
        }
    };
    for variable in &record.env {
        env.entry(variable.clone()).or_insert_with(|| placeholder.clone());
    }
    remove_git_settings(env, &placeholder);
    if record.git {
        add_git_settings(env, &record.hosts, &placeholder);
    }
    if let Some(login) = &record.ssh {
        ssh::add_variables(env, login);
    }
    add_rules(egress, record);
    Ok(())
}

/// Takes the right to use a secret from a Body; false if it had none. `others` has the records of its other secrets.
pub(super) fn remove_grant(
    egress: &mut Egress,
    env: &mut BTreeMap<String, String>,
    name: &str,
    others: &[SecretRecord],
) -> bool {
    let Some(at) = egress.secrets.iter().position(|grant| grant.name == name) else { return false };
    let SecretGrant { placeholder, .. } = egress.secrets.remove(at);
    remove_git_settings(env, &placeholder);
    env.retain(|_, value| *value != placeholder);
    let why = reason(name);
    egress.rules.retain(|rule| rule.why.as_ref() != Some(&why));
    ssh::remove_variables(env);
    for record in others.iter().filter(|record| record.name != name) {
        add_rules(egress, record);
        if let Some(login) = &record.ssh {
            ssh::add_variables(env, login);
        }
    }
    true
}

/// The variables of a Body's secrets, for commands: the Body may have started before it had them.
pub(crate) fn live_variables(spec: &Spec) -> BTreeMap<String, String> {
    let has_secrets = spec.egress.as_ref().is_some_and(|egress| !egress.secrets.is_empty());
    let is_live = |name: &str, value: &str| {
        value.contains(PLACEHOLDER_MARK) || name.starts_with(GIT_PREFIX) || ssh::is_variable(name, value)
    };
    let env = spec.env.iter().filter(|(name, value)| has_secrets && is_live(name, value));
    env.map(|(name, value)| (name.clone(), value.clone())).collect()
}

fn reason(name: &str) -> String {
    format!("the secret {name}")
}

/// Adds a rule for each host of a secret that no rule covers.
fn add_rules(egress: &mut Egress, record: &SecretRecord) {
    for host in &record.hosts {
        let to = if host.contains(':') { host.clone() } else { format!("{host}:443") };
        if !is_covered(&egress.all_rules(), &to) {
            let protocol = if record.ssh.is_some() { "+tcp" } else { "" };
            egress.rules.push(EgressRule::allow(to + protocol).because(reason(&record.name)));
        }
    }
}

/// Whether a rule is about a host of a secret already: it allows it, whole or in part, or names the same pattern.
fn is_covered(rules: &[EgressRule], to: &str) -> bool {
    let bare = to.strip_suffix(":443").unwrap_or(to);
    let names_it =
        |rule: &EgressRule| rule.action == RuleAction::Allow && [to, bare].contains(&rule.host_and_ports());
    let allows_it = || {
        let (host, port) = to.rsplit_once(':')?;
        // A rule with a window covers a host at all times: no second rule opens it outside.
        let always: Vec<EgressRule> =
            rules.iter().map(|rule| EgressRule { window: None, ..rule.clone() }).collect();
        let policy = Policy::new(&always).ok()?;
        policy.judge_name(host, port.parse().ok()?).ok()
    };
    rules.iter().any(names_it) || allows_it().is_some()
}

/// Lets git ask a shell function for the password of these hosts. It prints the placeholder.
fn add_git_settings(env: &mut BTreeMap<String, String>, hosts: &[String], placeholder: &str) {
    let helper = format!(
        "!f() {{ test \"$1\" = get && printf 'username=x-access-token\\npassword=%s\\n' {placeholder}; }}; f"
    );
    let mut settings = git_settings(env);
    let hosts = hosts.iter().filter(|host| !host.starts_with("**"));
    settings.extend(hosts.map(|host| (format!("credential.https://{host}.helper"), helper.clone())));
    set_git_settings(env, &settings);
}

fn remove_git_settings(env: &mut BTreeMap<String, String>, placeholder: &str) {
    let mut settings = git_settings(env);
    let before = settings.len();
    settings.retain(|(_, value)| !value.contains(placeholder));
    if settings.len() == before {
        return;
    }
    for at in 0..before {
        for part in ["KEY", "VALUE"] {
            env.remove(&format!("{GIT_PREFIX}{part}_{at}"));
        }
    }
    env.remove(GIT_COUNT);
    set_git_settings(env, &settings);
}

/// The settings of git in an environment.
fn git_settings(env: &BTreeMap<String, String>) -> Vec<(String, String)> {
    let count: usize = env.get(GIT_COUNT).and_then(|count| count.parse().ok()).unwrap_or(0);
    let part = |part: &str, at: usize| env.get(&format!("{GIT_PREFIX}{part}_{at}")).cloned();
    (0..count.min(GIT_SETTINGS_MAX)).map_while(|at| Some((part("KEY", at)?, part("VALUE", at)?))).collect()
}

fn set_git_settings(env: &mut BTreeMap<String, String>, settings: &[(String, String)]) {
    if settings.is_empty() {
        return;
    }
    env.insert(GIT_COUNT.to_owned(), settings.len().to_string());
    for (at, (key, value)) in settings.iter().enumerate() {
        env.insert(format!("{GIT_PREFIX}KEY_{at}"), key.clone());
        env.insert(format!("{GIT_PREFIX}VALUE_{at}"), value.clone());
    }
}

#[cfg(test)]
mod tests {
    use proto::egress::SecretFields;

    use super::{super::SecretSource, *};

    fn record(name: &str, hosts: &[&str], env: &[&str]) -> SecretRecord {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        SecretRecord {
            name: name.into(),
            source: SecretSource::Env("X".into()),
            hosts: list(hosts),
            fields: SecretFields::default(),
            env: list(env),
            git: false,
            prefix: Some("ghp_".into()),
            ssh: None,
            created_at: "now".into(),
        }
    }

    fn shown(egress: &Egress) -> Vec<String> {
        egress.all_rules().iter().map(EgressRule::shown).collect()
    }

    #[test]
    fn a_grant_has_a_placeholder_and_rules_that_nothing_covers() {
        let rules = vec![EgressRule::allow("GET a.test/x/**"), EgressRule::deny("evil.test")];
        let mut egress = Egress { rules, ..Egress::default() };
        let mut env = BTreeMap::from([("OWN".to_owned(), "mine".to_owned())]);
        let one = record("one", &["a.test", "b.test:8443", "*.c.test"], &["OWN", "KEY"]);
        add_grant(&mut egress, &mut env, &one).unwrap();
        let placeholder = egress.secrets[0].placeholder.clone();
        assert!(placeholder.starts_with("ghp_palph0") && placeholder.len() == 4 + 6 + 26, "{placeholder}");
        assert_eq!((env["OWN"].as_str(), &env["KEY"]), ("mine", &placeholder));
        let whole = [
            "allow GET a.test/x/**",
            "deny evil.test",
            "allow b.test:8443 (the secret one)",
            "allow *.c.test:443 (the secret one)",
        ];
        assert_eq!(shown(&egress), whole);
        let before = (egress.clone(), env.clone());
        add_grant(&mut egress, &mut env, &one).unwrap();
        assert_eq!((egress.clone(), env.clone()), before, "once is enough");
        // A host that two secrets share stays allowed until both are gone.
        let two = record("two", &["b.test:8443"], &["TWO"]);
        add_grant(&mut egress, &mut env, &two).unwrap();
        assert_ne!(egress.secrets[1].placeholder, placeholder);
        let others = [one.clone(), two.clone()];
        assert!(remove_grant(&mut egress, &mut env, "one", &others));
        assert_eq!(shown(&egress)[2..], ["allow b.test:8443 (the secret two)"]);
        assert!(!env.contains_key("KEY") && env.contains_key("TWO"));
        assert!(!remove_grant(&mut egress, &mut env, "one", &others));
        assert!(remove_grant(&mut egress, &mut env, "two", &[two]));
        assert_eq!((shown(&egress).len(), env.len()), (2, 1));
        Policy::new(&egress.all_rules()).unwrap();
    }

    #[test]
    fn git_gets_a_helper_beside_the_settings_of_the_caller() {
        let own =
            [("GIT_CONFIG_COUNT", "1"), ("GIT_CONFIG_KEY_0", "user.name"), ("GIT_CONFIG_VALUE_0", "me")];
        let own: BTreeMap<String, String> =
            own.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let mut env = own.clone();
        let mut egress = Egress::default();
        let git = SecretRecord { git: true, ..record("git", &["git.test", "api.git.test"], &[]) };
        add_grant(&mut egress, &mut env, &git).unwrap();
        add_grant(&mut egress, &mut env, &git).unwrap();
        assert_eq!(env["GIT_CONFIG_COUNT"], "3");
        assert_eq!(env["GIT_CONFIG_KEY_1"], "credential.https://git.test.helper");
        let script = env["GIT_CONFIG_VALUE_2"].strip_prefix('!').unwrap();
        let told = std::process::Command::new("sh").args(["-c", &format!("{script} get")]).output().unwrap();
        let placeholder = &egress.secrets[0].placeholder;
        assert_eq!(
            String::from_utf8(told.stdout).unwrap(),
            format!("username=x-access-token\npassword={placeholder}\n")
        );
        assert!(remove_grant(&mut egress, &mut env, "git", &[]));
        assert_eq!(env, own);
    }

    #[test]
    fn a_body_has_a_limited_number_of_secrets() {
        let (mut egress, mut env) = (Egress::default(), BTreeMap::new());
        let add = |egress: &mut Egress, env: &mut BTreeMap<_, _>, at: usize| {
            add_grant(egress, env, &record(&format!("s{at}"), &["a.test"], &[]))
        };
        (0..SECRETS_MAX).for_each(|at| add(&mut egress, &mut env, at).unwrap());
        assert_eq!(add(&mut egress, &mut env, SECRETS_MAX).unwrap_err().kind, Kind::Limit);
        add(&mut egress, &mut env, 0).unwrap();
    }
}
