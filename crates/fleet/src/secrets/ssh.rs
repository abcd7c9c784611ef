//! Secrets that are private keys of ssh: their records, the keys of their hosts, and the variables by which ssh and git find
//! the agent of the egress process.
//!
//! Invariant: a Body with such a secret has the public keys of its hosts only, so ssh asks nobody whether it trusts them.

use std::{collections::BTreeMap, path::PathBuf};

use proto::{
    Failure, Kind,
    egress::{Policy, SOCKET, SecretFields, SshLogin},
    guest::EGRESS_DIR,
    text::visible,
};
use vault::{
    Zeroizing,
    ssh::{KnownHost, SshKeyError, SshPrivateKey, host_label, known_hosts_of},
};

use super::{
    HostVariables, SecretRecord, SecretSource, SecretTerms,
    record::{ITEM_LEN_MAX, LIST_LEN_MAX, remove_repetitions},
};

/// Most users as whom a key logs in.
const USERS_MAX: usize = 8;
/// Longest name of a user.
const USER_LEN_MAX: usize = 64;
/// Most keys of hosts.
const HOST_KEYS_MAX: usize = 32;
/// The port of ssh.
const PORT: &str = "22";
/// The user as whom services log git in.
const GIT_USER: &str = "git";
/// Most bytes of a list of known hosts that are read.
const KNOWN_HOSTS_LEN_MAX: u64 = 4 << 20;
/// The list of known hosts of all users.
const SYSTEM_LIST: &str = "/etc/ssh/ssh_known_hosts";

/// The variable by which ssh finds its agent.
const AGENT_VARIABLE: &str = "SSH_AUTH_SOCK";
/// The variable by which git finds its ssh.
const GIT_VARIABLE: &str = "GIT_SSH_COMMAND";
/// The command of git, around lines of known hosts: ssh runs `printf` without a shell, and reads them from it.
const COMMAND_BEGIN: &str = "ssh -o 'KnownHostsCommand=/usr/bin/printf \"";
const COMMAND_END: &str = "\"'";
const LINE_END: &str = "\\n";

/// Adds what terms leave out: the user, and the keys of hosts that this user knows.
pub(super) fn complete(login: &mut SshLogin, hosts: &[String], variables: HostVariables) {
    if login.users.is_empty() {
        login.users.push(GIT_USER.to_owned());
    }
    let home = variables("HOME").map(PathBuf::from);
    let own = home.iter().flat_map(|home| [home.join(".ssh/known_hosts"), home.join(".ssh/known_hosts2")]);
    let mut list = String::new();
    for path in own.chain([PathBuf::from(SYSTEM_LIST)]) {
        // A list that cannot be read is missing; its hosts then need their keys.
        let read = sys::fd::read_small(&path, KNOWN_HOSTS_LEN_MAX).unwrap_or_default();
        list.push_str(&read);
        list.push('\n');
    }
    for host in hosts {
        let Ok((name, port)) = Policy::target(&with_port(host)) else { continue };
        let label = host_label(&name, port);
        let is_named = |line: &String| KnownHost::parse(line).is_some_and(|known| known.label == label);
        if !login.host_keys.iter().any(is_named) {
            login.host_keys.extend(known_hosts_of(&list, &label).iter().map(KnownHost::line));
        }
    }
}

fn with_port(host: &str) -> String {
    if host.contains(':') { host.to_owned() } else { format!("{host}:{PORT}") }
}

/// The record of terms about a private key.
pub(super) fn record(
    terms: SecretTerms,
    source: SecretSource,
    created_at: String,
) -> Result<SecretRecord, Failure> {
    let SecretTerms { name, hosts, fields, env, git, prefix, service, ssh, origin: _ } = terms;
    let usage = |message: String| Failure::new(Kind::Usage, message);
    let is_plain = fields == SecretFields::default() && env.is_empty() && !git && prefix.is_none();
    if !is_plain || service.is_some() {
        return Err(usage(format!(
            "the secret {name} is a key of ssh, which stands in no request and no variable"
        ))
        .hint(format!("name only its hosts: pal secret set {name} --ssh --to github.com < KEY")));
    }
    if hosts.is_empty() {
        return Err(usage(format!("the secret {name} names no host at which it logs in"))
            .hint(format!("name one: pal secret set {name} --ssh --to github.com < KEY")));
    }
    if hosts.len() > LIST_LEN_MAX || hosts.iter().any(|host| host.len() > ITEM_LEN_MAX) {
        return Err(usage(format!(
            "the secret {name} may name {LIST_LEN_MAX} hosts of {ITEM_LEN_MAX} bytes"
        )));
    }
    let targets = hosts.iter().map(|host| {
        Policy::target(&with_port(host)).map_err(|_| {
            usage(format!("{:?} is not a host at which a key of ssh logs in", visible(host)))
                .hint("name a host without wildcards, such as github.com or git.example.org:2222")
        })
    });
    let targets = targets.collect::<Result<Vec<_>, _>>()?;
    let login = check_login(&name, ssh.unwrap_or_default(), &targets)?;
    let mut hosts: Vec<String> = targets.into_iter().map(|(host, port)| format!("{host}:{port}")).collect();
    remove_repetitions(&mut hosts);
    Ok(SecretRecord {
        name,
        source,
        hosts,
        fields: SecretFields::default(),
        env: Vec::new(),
        git: false,
        prefix: None,
        ssh: Some(login),
        created_at,
    })
}

fn check_login(name: &str, login: SshLogin, targets: &[(String, u16)]) -> Result<SshLogin, Failure> {
    let usage = |message: String| Failure::new(Kind::Usage, message);
    let SshLogin { mut users, host_keys } = login;
    let is_user = |user: &String| {
        (1..=USER_LEN_MAX).contains(&user.len()) && user.bytes().all(|byte| byte.is_ascii_graphic())
    };
    if users.len() > USERS_MAX || !users.iter().all(is_user) {
        return Err(usage(format!(
            "a key of ssh logs in as at most {USERS_MAX} users, whose names have at most {USER_LEN_MAX} letters, digits \
             and signs"
        )));
    }
    remove_repetitions(&mut users);
    if host_keys.len() > HOST_KEYS_MAX {
        return Err(usage(format!("the secret {name} may have {HOST_KEYS_MAX} keys of hosts")));
    }
    let labels: Vec<String> = targets.iter().map(|(host, port)| host_label(host, *port)).collect();
    let read = |line: &String| {
        KnownHost::parse(line).filter(|known| labels.contains(&known.label)).ok_or_else(|| {
            usage(format!("{:?} is not the key of a host of the secret {name}", visible(line)))
                .hint("write it as a line of known_hosts: HOST TYPE KEY, with the type ssh-ed25519, ecdsa-sha2-nistp256, ecdsa-sha2-nistp384 or ssh-rsa")
        })
    };
    let known = host_keys.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    for ((host, port), label) in targets.iter().zip(&labels) {
        if !known.iter().any(|known| known.label == *label) {
            return Err(usage(format!(
                "the key of the host {label} is not known, so any host could take its place"
            ))
            .hint(format!("log in there once, and compare the fingerprint: ssh -p {port} {GIT_USER}@{host}"))
            .hint(format!("or give its published key: --host-key '{label} ssh-ed25519 AAAA…'")));
        }
    }
    let mut host_keys: Vec<String> = known.iter().map(KnownHost::line).collect();
    remove_repetitions(&mut host_keys);
    Ok(SshLogin { users, host_keys })
}

/// Checks the text of a private key.
pub(super) fn check_key(name: &str, bytes: &[u8]) -> Result<Zeroizing<String>, Failure> {
    let text = std::str::from_utf8(bytes).map_err(|_| SshKeyError::Damaged);
    match text.and_then(|text| SshPrivateKey::parse(text).map(|_| text)) {
        Ok(text) => Ok(Zeroizing::new(text.trim().to_owned() + "\n")),
        Err(error) => {
            let failure =
                Failure::new(Kind::Usage, format!("the value of the secret {name} cannot sign: {error}"));
            Err(match error {
                SshKeyError::Encrypted => failure
                    .hint("make a key for Bodies without one, and store it at the service: ssh-keygen -t ed25519 -N '' -f KEY")
                    .hint("or remove the passphrase of a copy: ssh-keygen -p -N '' -f COPY"),
                SshKeyError::OtherFormat => {
                    failure.hint("convert a copy to the format of OpenSSH: ssh-keygen -p -f COPY")
                }
                SshKeyError::Public => failure.hint("give the file beside it, without .pub"),
                SshKeyError::OtherType | SshKeyError::Damaged => {
                    failure.hint("make a key for Bodies: ssh-keygen -t ed25519 -N '' -f KEY")
                }
            })
        }
    }
}

fn agent_socket() -> String {
    format!("{EGRESS_DIR}/{SOCKET}")
}

/// Lets ssh find the agent, and git's ssh the keys of the hosts. Variables of the caller stay.
pub(super) fn add_variables(env: &mut BTreeMap<String, String>, login: &SshLogin) {
    env.entry(AGENT_VARIABLE.to_owned()).or_insert_with(agent_socket);
    let mut lines = match env.get(GIT_VARIABLE) {
        None => Vec::new(),
        Some(command) => match lines_of(command) {
            Some(lines) => lines,
            None => return,
        },
    };
    let label = |line: &str| KnownHost::parse(line).map(|known| known.label);
    // A host may have new keys.
    lines.retain(|line| !login.host_keys.iter().any(|new| label(new) == label(line)));
    lines.extend(login.host_keys.iter().cloned());
    let list: String = lines.iter().flat_map(|line| [line, LINE_END]).collect();
    env.insert(GIT_VARIABLE.to_owned(), format!("{COMMAND_BEGIN}{list}{COMMAND_END}"));
}

/// Removes the variables again. Those of the caller stay.
pub(super) fn remove_variables(env: &mut BTreeMap<String, String>) {
    env.retain(|name, value| !is_variable(name, value));
}

/// Whether a variable is one of this module.
pub(super) fn is_variable(name: &str, value: &str) -> bool {
    match name {
        AGENT_VARIABLE => value == agent_socket(),
        GIT_VARIABLE => lines_of(value).is_some(),
        _ => false,
    }
}

/// The lines of known hosts in a command that this module made.
fn lines_of(command: &str) -> Option<Vec<String>> {
    let list = command.strip_prefix(COMMAND_BEGIN)?.strip_suffix(COMMAND_END)?;
    Some(list.split_terminator(LINE_END).map(str::to_owned).collect())
}

#[cfg(test)]
#[path = "ssh_tests.rs"]
mod tests;
