//! Tests of the agent, with keys that ssh-keygen makes.

use std::{fs::File, process::Command};

use tokio::net::UnixStream;
use vault::ssh::verify;

use super::*;
use crate::{
    journal::tests::{lines, spool},
    proxy::tests::proxy,
};

const SESSION: &[u8] = b"a session: the hash of its key exchange";

/// The text of a new key.
fn make_key(name: &str) -> String {
    let file = std::env::temp_dir().join(format!("palisade-agent-{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&file);
    let made =
        Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&file).status().unwrap();
    assert!(made.success());
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    std::fs::remove_file(file.with_extension("pub")).unwrap();
    text
}

/// An agent with one key for git.test, that host's key, and a connection to it that carries [`SESSION`].
struct AgentSetting {
    agent: SshAgent,
    host: SshPrivateKey,
    user_key: Vec<u8>,
    opening: Option<Rc<HostOpening>>,
}

fn target(name: &str) -> Target {
    Target { host: Host::Name(name.into()), port: 22 }
}

fn order(key: &str, host_key: &[u8], seal: &SealKey) -> SshKeyOrder {
    let line = KnownHost { label: "git.test".into(), key: host_key.into() }.line();
    SshKeyOrder {
        name: "deploy".into(),
        hosts: vec!["git.test:22".into()],
        login: SshLogin { users: vec!["git".into()], host_keys: vec![line] },
        sealed: seal.seal("ssh key deploy", key.as_bytes()).unwrap(),
    }
}

impl AgentSetting {
    fn new(name: &str) -> Self {
        let (key, seal) = (make_key(name), SealKey::generate().unwrap());
        let host = SshPrivateKey::parse(&make_key(&format!("{name}-host"))).unwrap();
        let agent = SshAgent::default();
        agent.set(&[order(&key, host.public(), &seal)], Some(&seal));
        let opening = agent.watch(&target("git.test")).unwrap();
        opening.push(&[b"SSH-2.0-x\r\n", &host.sign(SESSION, 0).unwrap()[..], b"..."].concat());
        let user_key = SshPrivateKey::parse(&key).unwrap().public().to_vec();
        Self { agent, host, user_key, opening: Some(opening) }
    }

    fn binding(&self) -> Vec<u8> {
        binding(self.host.public(), SESSION, &self.host.sign(SESSION, 0).unwrap(), 0)
    }

    /// Binds a client to a session, and asks for a signature.
    fn ask(&self, binding: &[u8], data: &[u8]) -> Result<LoginSignature, String> {
        let mut session = BoundSession::default();
        self.agent.answer(binding, &mut session).map_err(|refused| refused.why)?;
        match self.agent.answer(&sign_request(&self.user_key, data), &mut session) {
            Ok(AgentReply::Signed(signed)) => Ok(signed),
            Ok(AgentReply::Message(_)) => Err("the request cannot be read".into()),
            Err(refused) => Err(refused.why),
        }
    }

    fn login(&self) -> LoginRequest<'_> {
        LoginRequest {
            session: SESSION,
            number: 50,
            user: "git",
            service: "ssh-connection",
            method: "publickey",
            algorithm: "ssh-ed25519",
            key: &self.user_key,
            host_key: None,
        }
    }
}

/// The parts of a request to log in.
#[derive(Clone, Copy)]
struct LoginRequest<'a> {
    session: &'a [u8],
    number: u8,
    user: &'a str,
    service: &'a str,
    method: &'a str,
    algorithm: &'a str,
    key: &'a [u8],
    host_key: Option<&'a [u8]>,
}

impl LoginRequest<'_> {
    fn data(&self) -> Vec<u8> {
        let mut data = Vec::new();
        put_string(&mut data, self.session);
        data.push(self.number);
        [self.user, self.service, self.method].iter().for_each(|text| put_string(&mut data, text.as_bytes()));
        data.push(1);
        put_string(&mut data, self.algorithm.as_bytes());
        put_string(&mut data, self.key);
        self.host_key.iter().for_each(|key| put_string(&mut data, key));
        data
    }
}

fn binding(host_key: &[u8], session: &[u8], signature: &[u8], forwards: u8) -> Vec<u8> {
    let mut message = vec![EXTENSION];
    [SESSION_BIND, host_key, session, signature].iter().for_each(|part| put_string(&mut message, part));
    message.push(forwards);
    message
}

fn sign_request(key: &[u8], data: &[u8]) -> Vec<u8> {
    let mut message = vec![SIGN_REQUEST];
    put_string(&mut message, key);
    put_string(&mut message, data);
    message.extend([0; 4]);
    message
}

#[test]
fn a_login_in_a_session_of_an_open_connection_is_signed() {
    let setting = AgentSetting::new("signed");
    let bound = LoginRequest {
        method: "publickey-hostbound-v00@openssh.com",
        host_key: Some(setting.host.public()),
        ..setting.login()
    };
    for data in [setting.login().data(), bound.data()] {
        let signed = setting.ask(&setting.binding(), &data).unwrap();
        assert_eq!(
            (signed.to.as_str(), signed.why.as_str()),
            ("git.test:22", "the secret deploy logs in as git")
        );
        assert!(verify(&setting.user_key, &signed.signature, &data));
    }
}

#[test]
fn nothing_but_such_a_login_is_signed() {
    let setting = AgentSetting::new("refused");
    let other = SshPrivateKey::parse(&make_key("refused-other")).unwrap();
    let (plain, whole) = (setting.login(), setting.login().data());
    let mut unsigned = whole.clone();
    let flag = unsigned.len() - plain.key.len() - 4 - plain.algorithm.len() - 4 - 1;
    assert_eq!(std::mem::take(&mut unsigned[flag]), 1);
    let hostbound = LoginRequest { method: "publickey-hostbound-v00@openssh.com", ..plain };
    for (what, data, why) in [
        ("any text", b"any text".to_vec(), "no request to log in"),
        ("nothing", Vec::new(), "no request to log in"),
        ("another message", LoginRequest { number: 51, ..plain }.data(), "no request to log in"),
        ("another service", LoginRequest { service: "ssh-userauth", ..plain }.data(), "no request to log in"),
        ("another method", LoginRequest { method: "hostbased", ..plain }.data(), "no request to log in"),
        ("no signature", unsigned, "no request to log in"),
        ("more behind it", [&whole[..], &[0]].concat(), "no request to log in"),
        ("less", whole[..whole.len() - 1].to_vec(), "no request to log in"),
        ("an unnamed host key", hostbound.data(), "no request to log in"),
        ("another user", LoginRequest { user: "root", ..plain }.data(), "logs in as git, and not as root"),
        (
            "another algorithm",
            LoginRequest { algorithm: "ssh-rsa", ..plain }.data(),
            "another key or algorithm",
        ),
        ("another key", LoginRequest { key: other.public(), ..plain }.data(), "another key or algorithm"),
        ("another session", LoginRequest { session: b"another", ..plain }.data(), "another session"),
        (
            "another host key",
            LoginRequest { host_key: Some(other.public()), ..hostbound }.data(),
            "another session",
        ),
    ] {
        let refused = setting.ask(&setting.binding(), &data).unwrap_err();
        assert!(refused.contains(why), "{what}: {refused}");
    }
    assert!(setting.ask(&setting.binding(), &whole).is_ok());
    // A key that the Body may not use, and no session.
    let mut session = BoundSession::default();
    let refused = setting.agent.answer(&sign_request(other.public(), &whole), &mut session).err().unwrap();
    assert!(refused.why.contains("no ssh secret"), "{refused:?}");
    let refused = setting.agent.answer(&sign_request(&setting.user_key, &whole), &mut session).err().unwrap();
    assert!(refused.why.contains("OpenSSH 8.9") && refused.to == "git.test:22", "{refused:?}");
}

#[test]
fn a_session_counts_only_with_its_host_and_an_own_connection() {
    let mut setting = AgentSetting::new("session");
    let data = setting.login().data();
    let (host, signature) = (setting.host.public().to_vec(), setting.host.sign(SESSION, 0).unwrap());
    let stranger = SshPrivateKey::parse(&make_key("session-stranger")).unwrap();
    let foreign = stranger.sign(SESSION, 0).unwrap();
    for (what, binding, why) in [
        ("a forwarded agent", binding(&host, SESSION, &signature, 1), "is forwarded"),
        (
            "a signature of another session",
            binding(&host, b"another", &signature, 0),
            "not signed the session",
        ),
        ("a signature of another host", binding(&host, SESSION, &foreign, 0), "not signed the session"),
        ("no session", binding(&host, b"", &signature, 0), "not signed the session"),
        // The session is sound, but it is one of another machine.
        (
            "a host without a connection",
            binding(stranger.public(), SESSION, &foreign, 0),
            "no open connection",
        ),
    ] {
        let refused = setting.ask(&binding, &data).unwrap_err();
        assert!(refused.contains(why), "{what}: {refused}");
    }
    // A host of the secret that shows another key than the known one.
    setting.opening.as_ref().unwrap().push(&foreign);
    let refused = setting.ask(&binding(stranger.public(), SESSION, &foreign, 0), &data).unwrap_err();
    assert!(refused.contains("does not know the key"), "{refused}");
    // Two sessions of one client.
    let mut session = BoundSession::default();
    let mut bind = |binding: Vec<u8>| setting.agent.answer(&binding, &mut session);
    assert!(matches!(bind(setting.binding()), Ok(AgentReply::Message(reply)) if reply == [SUCCESS]));
    assert!(matches!(bind(setting.binding()), Ok(AgentReply::Message(reply)) if reply == [SUCCESS]));
    let second = binding(&host, b"another", &setting.host.sign(b"another", 0).unwrap(), 0);
    assert!(matches!(bind(second), Ok(AgentReply::Message(reply)) if reply == [FAILURE]));
    assert!(matches!(bind(setting.binding()), Ok(AgentReply::Message(reply)) if reply == [FAILURE]));
    let refused = setting.agent.answer(&sign_request(&setting.user_key, &data), &mut session).err().unwrap();
    assert!(refused.why.contains("two sessions"), "{refused:?}");
    // The connection ends.
    assert!(setting.ask(&setting.binding(), &data).is_ok());
    setting.opening = None;
    let refused = setting.ask(&setting.binding(), &data).unwrap_err();
    assert!(refused.contains("no open connection"), "{refused}");
}

#[test]
fn only_hosts_of_keys_are_watched_and_a_key_that_is_taken_signs_no_more() {
    let setting = AgentSetting::new("taken");
    let data = setting.login().data();
    for other in [target("web.test"), Target { port: 2222, ..target("git.test") }] {
        assert!(setting.agent.watch(&other).is_none(), "{other}");
    }
    let address = Target { host: Host::Address([192, 0, 2, 7].into()), port: 22 };
    assert!(setting.agent.watch(&address).is_none());
    assert!(setting.ask(&setting.binding(), &data).is_ok());
    setting.agent.set(&[], None);
    assert!(setting.ask(&setting.binding(), &data).unwrap_err().contains("no ssh secret"));
}

/// Sends messages to a proxy with a setting's agent and this spool, and returns the replies.
async fn talk(setting: AgentSetting, file: File, messages: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let proxy = Rc::new(Proxy { ssh: setting.agent, ..proxy(file, &[]) });
    let (mut client, inside) = UnixStream::pair().unwrap();
    let asking = async {
        let mut replies = Vec::new();
        for message in messages {
            let mut framed = Vec::new();
            put_string(&mut framed, message);
            // Cut into pieces, as a stream may be.
            for byte in framed {
                client.write_all(&[byte]).await.unwrap();
            }
            let Ok(len) = client.read_u32().await else { break };
            let mut reply = vec![0; len as usize];
            client.read_exact(&mut reply).await.unwrap();
            replies.push(reply);
        }
        drop(client);
        replies
    };
    let replies = tokio::join!(proxy.connection(inside), asking).1;
    drop(setting.opening);
    replies
}

#[tokio::test]
async fn keys_are_listed_and_each_signature_is_recorded_before_it_goes_out() {
    let setting = AgentSetting::new("recorded");
    let sign = sign_request(&setting.user_key, &setting.login().data());
    let root = sign_request(&setting.user_key, &LoginRequest { user: "root", ..setting.login() }.data());
    let key = setting.user_key.clone();
    let messages = [
        vec![REQUEST_IDENTITIES],
        setting.binding(),
        sign.clone(),
        sign.clone(),
        root,
        // Add and remove keys, lock, another extension, and messages that cannot be read.
        vec![17],
        vec![19],
        vec![22, 0, 0, 0, 0],
        vec![EXTENSION, 0, 0, 0, 5, b'q', b'u', b'e', b'r', b'y'],
        vec![REQUEST_IDENTITIES, 0],
        vec![SIGN_REQUEST, 0xff, 0xff, 0xff, 0xff],
        vec![],
    ];
    let file = spool();
    let replies = talk(setting, file.try_clone().unwrap(), &messages).await;
    let recorded = lines(&file);
    let mut listed = vec![IDENTITIES, 0, 0, 0, 1];
    put_string(&mut listed, &key);
    put_string(&mut listed, b"deploy");
    assert_eq!(replies[..2], [listed, vec![SUCCESS]]);
    assert!(replies[2..4].iter().all(|reply| reply[0] == SIGNATURE && reply.len() > 64), "{replies:?}");
    assert_eq!(replies[4..], vec![vec![FAILURE]; 8]);
    let shown: Vec<(bool, &str)> =
        recorded.iter().map(|line| (line.data.allowed, line.data.why.as_str())).collect();
    assert_eq!(shown[..2], [(true, "the secret deploy logs in as git"); 2]);
    assert!(!shown[2].0 && shown.len() == 3, "{shown:?}");
}

#[tokio::test]
async fn a_signature_that_cannot_be_recorded_does_not_go_out() {
    let setting = AgentSetting::new("full");
    let messages = [setting.binding(), sign_request(&setting.user_key, &setting.login().data())];
    let full = File::options().append(true).open("/dev/full").unwrap();
    assert_eq!(talk(setting, full, &messages).await, [vec![SUCCESS], vec![FAILURE]]);
}

#[tokio::test]
async fn a_long_message_ends_the_connection() {
    let setting = AgentSetting::new("long");
    let replies = talk(setting, spool(), &[vec![REQUEST_IDENTITIES], vec![0; MESSAGE_LEN_MAX]]).await;
    assert_eq!(replies.len(), 2);
    let setting = AgentSetting::new("longer");
    let proxy = Proxy { ssh: setting.agent, ..proxy(spool(), &[]) };
    let (mut client, inside) = UnixStream::pair().unwrap();
    client.write_all(&u32::try_from(MESSAGE_LEN_MAX + 1).unwrap().to_be_bytes()).await.unwrap();
    let ended = Rc::new(proxy).connection(inside).await.unwrap_err();
    assert_eq!(ended.kind(), io::ErrorKind::InvalidData);
}

#[tokio::test]
async fn the_first_bytes_of_a_host_are_kept_on_their_way() {
    let opening = Rc::new(HostOpening::of(target("git.test")));
    let (near, mut far) = tokio::io::duplex(1 << 20);
    let mut tapped = TappedWriter::new(near, Some(opening.clone()));
    let sent: Vec<u8> = (0..40_000_u32).flat_map(u32::to_be_bytes).collect();
    tapped.write_all(&sent).await.unwrap();
    tapped.shutdown().await.unwrap();
    drop(tapped);
    let mut received = Vec::new();
    far.read_to_end(&mut received).await.unwrap();
    assert_eq!(received, sent);
    assert!(opening.has(&sent[1000..1100]) && !opening.has(&sent[1000..1010]), "a short text proves nothing");
    assert!(!opening.has(&sent[sent.len() - 100..]), "later bytes are not kept");
}
