//! `pal secret`: values are stored, given to Bodies as placeholders, and printed by nothing.

use std::{fs, path::Path, process::Command};

use serde_json::{Value, json};

use crate::{cli_test, pal::Pal};

const VALUE: &str = "s3cr3t-Value-0123456789";

/// The secrets that a Body may use, by name.
fn secrets_of(pal: &Pal, body: &str) -> Vec<Value> {
    let shown: Value = serde_json::from_str(&pal.ok(&format!("net show {body} --json"))).unwrap();
    shown.get("secrets").and_then(Value::as_array).cloned().unwrap_or_default()
}

/// Files below a directory that hold a text.
fn files_with(dir: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    // The kernel's own directories of an overlay cannot be read.
    let Ok(entries) = fs::read_dir(dir) else { return found };
    for entry in entries.flatten() {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() {
            found.extend(files_with(&path, text));
        } else if kind.is_file() && fs::read(&path).is_ok_and(|bytes| has_text(&bytes, text.as_bytes())) {
            found.push(path.to_string_lossy().into_owned());
        }
    }
    found
}

fn has_text(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}

cli_test! {
    /// A Body gets a placeholder, in its variables and for git, and gets and loses secrets while it runs.
    fn a_body_uses_a_secret_that_it_never_sees(pal) {
        let set = pal.feed(["secret", "set", "github", "--for", "github", "--to", "git.corp.test"], format!("{VALUE}\n").as_bytes());
        assert!(set.status.success() && set.stdout == b"github\n", "{set:?}");
        let body = pal.ok("create --secret github");
        let env = pal.ok(&format!("exec {body} -- /bin/sh -c env"));
        let token = env.lines().find_map(|line| line.strip_prefix("GH_TOKEN=")).unwrap();
        assert!(token.starts_with("ghp_palph0") && env.contains("credential.https://git.corp.test.helper"), "{env}");
        assert_eq!(secrets_of(pal, &body)[0]["placeholder"], token);
        assert!(!files_with(&pal.data(), token).is_empty(), "a placeholder is found where it is stored");
        let listed: Value = serde_json::from_str(&pal.ok("secret ls --json")).unwrap();
        assert_eq!((&listed["source"], &listed["bodies"]), (&json!("stored"), &json!([body])));
        assert!(pal.ok(&format!("net test {body} api.github.com:443")).contains("the secret github"));

        // Another one is granted and revoked while the Body runs; commands that start afterwards have its variable.
        let unused = pal.line("secret set stripe --to api.stripe.test --env STRIPE_KEY -- printf value-of-stripe");
        assert!(unused.code == 0 && unused.talk.contains("pal secret grant BODY stripe"), "{unused:?}");
        assert_eq!(pal.ok(&format!("secret grant {body} stripe")), "stripe");
        let stripe = pal.ok(&format!("exec {body} -- printenv STRIPE_KEY"));
        assert!(stripe.starts_with("palph0"), "{stripe}");
        let refused = pal.line("secret rm stripe");
        assert!(refused.code == 122 && refused.talk.contains("--force"), "{refused:?}");
        assert_eq!(pal.ok(&format!("secret revoke {body} stripe")), "stripe");
        assert_eq!(pal.line(&format!("exec {body} -- printenv STRIPE_KEY")).code, 1);
        let none = pal.line(&format!("secret revoke {body} stripe"));
        assert_eq!(none.code, 121, "{none:?}");

        // A fork has the placeholder of its parent; a secret that is removed by force is gone from both.
        let fork = pal.ok(&format!("fork {body}"));
        assert_eq!(secrets_of(pal, &fork)[0]["placeholder"], token);
        pal.ok("secret rm --force github stripe");
        assert_eq!((secrets_of(pal, &body), secrets_of(pal, &fork)), (vec![], vec![]));
        // The variables with which a Body started stay until its next start; the placeholder in them is worth nothing.
        pal.ok(&format!("stop --grace 0s {body}"));
        pal.ok(&format!("start {body}"));
        assert_eq!(pal.line(&format!("exec {body} -- printenv GH_TOKEN")).code, 1);
        assert_eq!(files_with(&pal.data(), VALUE), Vec::<String>::new());
        let kinds: Vec<Value> = pal.events().iter().map(|event| event["type"].clone()).collect();
        assert!(kinds.contains(&json!("secret.stored")) && kinds.contains(&json!("secret.removed")), "{kinds:?}");
        for id in [body, fork] {
            pal.ok(&format!("rm --force {id}"));
        }
    }
}

cli_test! {
    /// A secret that could not work is refused when it is set, with the way out; nothing prints a value.
    fn mistakes_are_named_when_a_secret_is_set(pal) {
        for (line, said) in [
            ("secret set a -- printf x", "names no host"),
            ("secret set a --to * -- printf x", "is not a host"),
            ("secret set A --to a.test -- printf x", "cannot be the name"),
            ("secret set a --to a.test --header user-agent -- printf x", "no secret belongs"),
            ("secret set a --to a.test -- false", "gave none"),
            ("secret set a --to a.test --file /nonexistent", "cannot be read"),
            ("secret set a --to a.test --from-env PALISADE_NOT_SET", "does not have"),
            ("secret set a --for nothing -- printf x", "nothing"),
            ("create --secret nothing", "there is no secret \"nothing\""),
            ("secret rm nothing", "there is no secret"),
            ("secret set a --ssh -- printf x", "names no host"),
            ("secret set a --ssh --to *.test -- printf x", "is not a host"),
            ("secret set a --ssh --to unknown.test -- printf x", "is not known"),
            ("secret set a --ssh --to a.test --host-key a.test -- printf x", "is not the key of a host"),
            ("secret set a --ssh --to a.test --header x-key -- printf x", "cannot be used with"),
            ("secret set a --to a.test --ssh-user git -- printf x", "--ssh"),
        ] {
            let refused = pal.line(line);
            assert!(refused.code != 0 && refused.talk.contains(said), "{line}: {refused:?}");
        }
        let empty = pal.feed(["secret", "set", "a", "--to", "a.test"], b"\n");
        assert!(!empty.status.success() && String::from_utf8_lossy(&empty.stderr).contains("is empty"), "{empty:?}");
        assert_eq!(pal.ok("secret ls --json"), "");
    }
}

/// Prints a new private key in the format of OpenSSH. ssh-keygen does not run with a user id that has no name.
const MAKE_KEY: &str = r#"
import base64, struct, subprocess, sys
text = lambda data: struct.pack('>I', len(data)) + data
openssl = lambda *words, data=None: subprocess.run(['openssl', *words, '-outform', 'DER'], input=data, capture_output=True, check=True).stdout
private = openssl('genpkey', '-algorithm', 'ed25519')
point = openssl('pkey', '-inform', 'DER', '-pubout', data=private)[-32:]
public = text(b'ssh-ed25519') + text(point)
secret = b'\1\2\3\4' * 2 + public + text(private[-32:] + point) + text(b'')
secret += bytes(range(1, 1 + -len(secret) % 8))
whole = b'openssh-key-v1\0' + text(sys.argv[1].encode()) + text(b'none') + text(b'') + struct.pack('>I', 1) + text(public) + text(secret)
packed = base64.b64encode(whole).decode()
lines = [packed[at:at + 70] for at in range(0, len(packed), 70)]
print('-----BEGIN OPENSSH PRIVATE KEY-----', *lines, '-----END OPENSSH PRIVATE KEY-----', sep='\n')
"#;

/// The text of a new private key; with another cipher than `none` a passphrase protects it.
fn make_key(cipher: &str) -> String {
    let made = Command::new("python3").args(["-c", MAKE_KEY, cipher]).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    String::from_utf8(made.stdout).unwrap()
}

cli_test! {
    /// A key of ssh is stored sealed, and a Body has an agent and the public keys of the hosts.
    fn a_body_has_an_agent_and_not_the_key(pal) {
        const HOST_KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl";
        let (key, known) = (make_key("none"), format!("git.test {HOST_KEY}"));
        let set = ["secret", "set", "deploy", "--ssh", "--to", "git.test", "--host-key", &known];
        let refused = pal.feed(set, make_key("aes256-ctr").as_bytes());
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("a passphrase protects it") && said.contains("ssh-keygen -p"), "{said}");
        assert!(!pal.feed(set, b"hunter2").status.success());
        let stored = pal.feed(set, key.as_bytes());
        assert!(stored.status.success(), "{stored:?}");
        let listed: Value = serde_json::from_str(&pal.ok("secret ls --json")).unwrap();
        assert_eq!((&listed["hosts"], &listed["ssh"]), (&json!(["git.test:22"]), &json!({ "users": ["git"], "host_keys": [known] })));
        assert!(pal.ok("secret ls").contains("ssh:git"));
        let (body, late) = (pal.ok("create --secret deploy"), pal.ok("create --allow a.test"));
        pal.ok(&format!("secret grant {late} deploy"));
        for one in [&body, &late] {
            let env = pal.ok(&format!("exec {one} -- /bin/sh -c env"));
            assert!(env.contains("SSH_AUTH_SOCK=/run/palisade/egress.sock\n") && env.contains(HOST_KEY), "{env}");
        }
        pal.ok(&format!("secret revoke {late} deploy"));
        let env = pal.ok(&format!("exec {late} -- /bin/sh -c env"));
        assert!(!env.contains("SSH_AUTH_SOCK") && !env.contains("GIT_SSH_COMMAND"), "{env}");
        let keys = pal.ok(&format!("exec {body} -- ssh-add -l"));
        assert!(keys.contains("deploy (ED25519)"), "{keys}");
        assert!(pal.line(&format!("net show {body}")).out.contains("git.test:22+tcp"));
        pal.ok(&format!("secret revoke {body} deploy"));
        assert!(!pal.line(&format!("net show {body}")).out.contains("git.test"));
        let keys = pal.line(&format!("exec {body} -- ssh-add -l"));
        assert!(keys.code == 1 && keys.out.contains("no identities"), "{keys:?}");
        let secret_line = key.lines().nth(2).unwrap();
        assert_eq!(files_with(&pal.data(), secret_line), Vec::<String>::new());
        pal.ok(&format!("rm --force {body} {late}"));
        pal.ok("secret rm deploy");
    }
}
