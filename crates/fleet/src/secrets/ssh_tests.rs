//! Tests of keys of ssh: their records, their hosts and their variables.

use std::process::Command;

use super::{super::SecretOrigin, *};

const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl";
const OTHER: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAfuCHKVTjquxvt6CM6tdG4SLp1Btn/nOeHHE5UOzRdf";

fn login(users: &[&str], host_keys: &[String]) -> SshLogin {
    SshLogin { users: users.iter().map(|user| (*user).to_owned()).collect(), host_keys: host_keys.to_vec() }
}

fn made(hosts: &[&str], login: SshLogin) -> Result<SecretRecord, Failure> {
    let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
    let terms =
        SecretTerms { hosts, ssh: Some(login), ..SecretTerms::new("deploy", SecretOrigin::Env("X".into())) };
    record(terms, SecretSource::Env("X".into()), "now".into())
}

#[test]
fn a_key_of_ssh_has_hosts_with_ports_and_their_keys() {
    let keys = [format!("Git.test {KEY} a comment"), format!("[git.test]:2222 {OTHER}")];
    let record = made(&["git.test", "Git.test:2222", "git.test:22"], login(&["git"], &keys)).unwrap();
    assert_eq!(record.hosts, ["git.test:22", "git.test:2222"]);
    assert_eq!(
        record.ssh,
        Some(login(&["git"], &[format!("git.test {KEY}"), format!("[git.test]:2222 {OTHER}")]))
    );
    assert!(record.env.is_empty() && record.fields == SecretFields::default());
    let key = [format!("git.test {KEY}")];
    for (hosts, given, said) in [
        (&[][..], login(&["git"], &[]), "names no host"),
        (&["*.test"], login(&["git"], &key), "is not a host"),
        (&["192.0.2.7"], login(&["git"], &key), "is not a host"),
        (&["git.test:20-30"], login(&["git"], &key), "is not a host"),
        (&["git.test"], login(&["git"], &[]), "is not known"),
        (&["git.test:2222"], login(&["git"], &key), "is not the key of a host"),
        (&["git.test"], login(&["git"], &[KEY.to_owned()]), "is not the key of a host"),
        (&["git.test"], login(&["a b"], &key), "users"),
        (&["git.test"], login(&["a", "b", "c", "d", "e", "f", "g", "h", "i"], &key), "at most 8 users"),
    ] {
        let refused = made(hosts, given).unwrap_err();
        assert!(refused.message.contains(said), "{said}: {refused:?}");
    }
    let terms = SecretTerms { git: true, ..SecretTerms::new("deploy", SecretOrigin::Env("X".into())) };
    assert!(super::record(terms, SecretSource::Env("X".into()), "now".into()).is_err());
}

#[test]
fn keys_of_hosts_come_from_the_known_hosts_of_the_user() {
    let home = std::env::temp_dir().join(format!("palisade-home-{}", std::process::id()));
    std::fs::create_dir_all(home.join(".ssh")).unwrap();
    std::fs::write(home.join(".ssh/known_hosts"), format!("git.test {KEY}\n[git.test]:2222 {OTHER}\n"))
        .unwrap();
    fn variables(name: &str) -> Option<std::ffi::OsString> {
        (name == "HOME")
            .then(|| std::env::temp_dir().join(format!("palisade-home-{}", std::process::id())).into())
    }
    let hosts = ["git.test".to_owned(), "git.test:2222".to_owned(), "third.test".to_owned()];
    let mut found = SshLogin::default();
    complete(&mut found, &hosts, variables);
    assert_eq!(found, login(&["git"], &[format!("git.test {KEY}"), format!("[git.test]:2222 {OTHER}")]));
    // A key that is named counts alone.
    let mut named = login(&["me"], &[format!("git.test {OTHER}")]);
    complete(&mut named, &hosts[..1], variables);
    assert_eq!(named, login(&["me"], &[format!("git.test {OTHER}")]));
    std::fs::remove_dir_all(home).unwrap();
}

#[test]
fn variables_lead_ssh_to_the_agent_and_to_the_keys_of_hosts() {
    let mut env = BTreeMap::new();
    let first = login(&["git"], &[format!("git.test {KEY}")]);
    let second = login(&["git"], &[format!("[b.test]:2222 {OTHER}")]);
    add_variables(&mut env, &first);
    add_variables(&mut env, &first);
    add_variables(&mut env, &second);
    assert_eq!(env["SSH_AUTH_SOCK"], "/run/palisade/egress.sock");
    // The shell and then ssh take the command apart.
    let script = format!("ssh() {{ shift; echo \"$1\"; }}; {}", env["GIT_SSH_COMMAND"]);
    let option = Command::new("sh").args(["-c", &script]).output().unwrap().stdout;
    let option = String::from_utf8(option).unwrap();
    let command = option.trim().strip_prefix("KnownHostsCommand=").unwrap();
    let printed = Command::new("sh").args(["-c", command]).output().unwrap().stdout;
    assert_eq!(String::from_utf8(printed).unwrap(), format!("git.test {KEY}\n[b.test]:2222 {OTHER}\n"));
    // A new key takes the place of the former one of its host.
    add_variables(&mut env, &login(&["git"], &[format!("git.test {OTHER}")]));
    assert!(!env["GIT_SSH_COMMAND"].contains(KEY) && env["GIT_SSH_COMMAND"].contains("b.test"));
    assert!(env.iter().all(|(name, value)| is_variable(name, value)));
    remove_variables(&mut env);
    assert!(env.is_empty());
    // Those of the caller stay.
    let own = [("SSH_AUTH_SOCK", "/own"), ("GIT_SSH_COMMAND", "ssh -v")];
    let own: BTreeMap<String, String> = own.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let mut env = own.clone();
    add_variables(&mut env, &first);
    assert_eq!(env, own);
    remove_variables(&mut env);
    assert_eq!(env, own);
}

#[test]
fn a_text_that_is_no_usable_key_is_refused_with_the_way_out() {
    let file = std::env::temp_dir().join(format!("palisade-value-{}", std::process::id()));
    let make = |passphrase: &str| {
        let _ = std::fs::remove_file(&file);
        let arguments = ["-q", "-t", "ed25519", "-N", passphrase, "-f"];
        assert!(Command::new("ssh-keygen").args(arguments).arg(&file).status().unwrap().success());
        std::fs::read_to_string(&file).unwrap()
    };
    let good = make("");
    assert_eq!(*check_key("deploy", format!("\n{good}\n").as_bytes()).unwrap(), good);
    let refused = check_key("deploy", make("passphrase").as_bytes()).unwrap_err();
    assert!(refused.message.contains("a passphrase protects it"), "{refused:?}");
    assert!(refused.hints.iter().any(|hint| hint.contains("ssh-keygen -p")), "{refused:?}");
    for text in [&b"hunter2"[..], b"\xff", KEY.as_bytes()] {
        assert!(!format!("{:?}", check_key("deploy", text).unwrap_err()).contains("hunter2"));
    }
    std::fs::remove_file(file.with_extension("pub")).unwrap();
    std::fs::remove_file(file).unwrap();
}
