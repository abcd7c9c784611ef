//! The readers of hostile bytes as the fuzz targets call them: each checks what must hold for every input.

use std::net::IpAddr;

use proto::egress::{
    EgressRule, EgressSecret, PLACEHOLDER_MARK, Permit, PermitTerms, Policy, Protocol, RequestPermit,
    RequestTarget, RuleLimit, SecretFields,
};
use vault::{
    SealKey,
    ssh::{KnownHost, SshPrivateKey, SshReader, known_hosts_of, verify},
};

use crate::{
    client_hello::{HELLO_LEN_MAX, HelloReader},
    dns_message::{self, DnsRecord, ResponseCode},
    first_bytes::{FirstBytes, FirstBytesVerdict},
    http_body::{BodyLength, BodyReader},
    http_head::HttpRequest,
    inspect::{Injector, Mask, Rewrite},
    secrets::{SecretTable, has_placeholder},
    ssh_agent,
    target::{Host, Target},
};

fn target() -> Target {
    Target { host: Host::Name("a.test".into()), port: 80 }
}

/// A DNS message: the answer has the question as it came, and a query that is read has no second reading.
pub fn dns(message: &[u8]) {
    match dns_message::parse(message) {
        Ok(query) => {
            assert!(query.name.bytes().all(|byte| byte.is_ascii_graphic() && !byte.is_ascii_uppercase()));
            for record in [DnsRecord::Address([198, 18, 0, 1].into()), DnsRecord::Name("a.test".into())] {
                let answer = query.answer(ResponseCode::NoError, Some(&record));
                assert!(answer.len() <= message.len() + 64 && answer[..2] == message[..2]);
                assert!(
                    dns_message::parse(&answer).is_err_and(|answer| answer.is_none()),
                    "no answer to an answer"
                );
            }
        }
        Err(Some(answer)) => assert!(answer.len() >= 12 && answer[..2] == message[..2]),
        Err(None) => {}
    }
}

/// A ClientHello in two cuts, which end alike.
pub fn client_hello(stream: &[u8], pieces: &[&[u8]]) {
    let read = |pieces: &[&[u8]]| {
        let mut reader = HelloReader::default();
        pieces.iter().map(|piece| reader.push(piece)).find(|read| !matches!(read, Ok(None)))
    };
    assert!(stream.len() > HELLO_LEN_MAX || read(&[stream]) == read(pieces));
}

/// An HTTP head: what is sent is a head that is read again, and names the judged host and no other.
pub fn http_head(head: &[u8]) {
    let Ok(request) = HttpRequest::parse(head) else { return };
    if request.check_host(&target()).is_err() {
        return;
    }
    for protocol in [Protocol::Http, Protocol::PlainHttp] {
        let permit = Permit {
            protocol,
            private: false,
            inspect: false,
            connects_late: false,
            terms: PermitTerms::default(),
            rule: String::new(),
        };
        let Ok(body) = request.check_protocol(&permit) else { continue };
        let sent = request.for_host(&target(), &permit, body, &Default::default());
        let Some(again) =
            sent.strip_suffix("\r\n\r\n").and_then(|sent| HttpRequest::parse(sent.as_bytes()).ok())
        else {
            unreachable!("{sent:?} is no head")
        };
        assert!(again.check_host(&target()).is_ok() && again.check_protocol(&permit) == Ok(body), "{sent:?}");
    }
}

/// A chunked body in two cuts, which end alike.
pub fn http_body(stream: &[u8], pieces: &[&[u8]]) {
    let read = |pieces: &[&[u8]]| {
        let mut reader = BodyReader::new(BodyLength::Chunked);
        let mut len = 0;
        for piece in pieces {
            match reader.push(piece) {
                Ok(taken) => len += taken,
                Err(_) => return None,
            }
        }
        Some((len, reader.is_done()))
    };
    assert_eq!(read(&[stream]), read(pieces));
}

/// The first bytes of a program, in two cuts: what one denies, the other never lets through.
pub fn first_bytes(stream: &[u8], pieces: &[&[u8]]) {
    let read = |pieces: &[&[u8]]| {
        let mut first = FirstBytes::default();
        let mut last = FirstBytesVerdict::Unclear;
        for piece in pieces {
            last = first.push(piece, &target());
            if matches!(last, FirstBytesVerdict::Pass | FirstBytesVerdict::Deny(_)) {
                break;
            }
        }
        last
    };
    let is_denied = |verdict: &FirstBytesVerdict| matches!(verdict, FirstBytesVerdict::Deny(_));
    let (whole, cut) = (read(&[stream]), read(pieces));
    assert!(stream.len() > HELLO_LEN_MAX || is_denied(&whole) == is_denied(&cut), "{whole:?} {cut:?}");
}

/// A condition on a query or a header, and a request: what fulfils it for a rule that allows has the name once, and
/// fulfils it for a rule that denies.
pub fn conditions(name: &str, pattern: &str, query: &str, value: &[u8]) {
    let pairs = || [(name.to_owned(), pattern.to_owned())].into();
    let judge = |rules: &[EgressRule], headers: &[(&str, &[u8])]| {
        let request = RequestTarget { query: Some(query), headers, ..RequestTarget::new("GET", "/") };
        Policy::new(rules).map(|policy| policy.judge_request("a.test", 443, &request).is_ok())
    };
    let all = EgressRule::allow("a.test");
    let asked = |rule: EgressRule| EgressRule { query: pairs(), ..rule };
    if judge(&[asked(all.clone())], &[]) == Ok(true) {
        let is_named = |part: &&str| part.split('=').next() == Some(name);
        assert_eq!(query.split('&').filter(is_named).count(), 1, "{query:?}");
        assert_eq!(judge(&[all.clone(), asked(EgressRule::deny("a.test"))], &[]), Ok(false), "{query:?}");
    }
    let headed = |rule: EgressRule| EgressRule { headers: pairs(), ..rule };
    let one = [(name, value)];
    if judge(&[headed(all.clone())], &one) == Ok(true) {
        assert_eq!(judge(&[all.clone(), headed(EgressRule::deny("a.test"))], &one), Ok(false));
        assert_eq!(judge(&[headed(all)], &[(name, value), (name, value)]), Ok(false), "twice");
    }
}

/// The other texts of a rule: those that can be read have a meaning.
pub fn rule_terms(window: &str, rate: &str, bytes: &str, forward: &str) {
    let limit = |rate: Option<&str>, bytes: Option<&str>| {
        Some(RuleLimit { rate: rate.map(str::to_owned), bytes: bytes.map(str::to_owned) })
    };
    let all = || EgressRule::allow("a.test");
    for rule in [
        EgressRule { window: Some(window.to_owned()), ..all() },
        EgressRule { limit: limit(Some(rate), None), ..all() },
        EgressRule { limit: limit(None, Some(bytes)), ..all() },
        EgressRule { forward: Some(forward.to_owned()), ..all() },
    ] {
        let Ok(policy) = Policy::new(&[rule]) else { continue };
        if let Ok(permit) = policy.judge_name("a.test", 443) {
            let budget = permit.terms.budget.as_ref();
            assert!(budget.and_then(|budget| budget.bytes.as_ref()).is_none_or(|bytes| bytes.bytes >= 1024));
            assert!(budget.and_then(|budget| budget.rate.as_ref()).is_none_or(|rate| rate.count > 0));
        }
    }
}

/// A rule and a request: a path that a rule with conditions takes has no other reading.
pub fn rule(rule: &str, method: &str, path: &str) {
    let target = RequestTarget::new(method, path);
    if target.check_one_reading().is_ok() {
        assert!(!path.contains("..") || !path.split('/').any(|part| part == ".."), "{path:?}");
        assert!(!path.to_ascii_lowercase().contains("%2e") && !path.contains('\\'), "{path:?}");
    }
    let Ok(policy) = Policy::parse(&[rule]) else { return };
    let judged = policy.judge_request("a.test", 443, &target);
    if judged.is_ok() {
        assert!(policy.judge_name("a.test", 443).is_ok(), "{rule:?}");
        let has_path = rule.contains('/') && !rule.contains("/**");
        assert!(!has_path || target.check_one_reading().is_ok(), "{rule:?} {path:?}");
    }
}

/// The head of a request: no placeholder of a secret leaves in it, and no value that its fields do not name.
pub fn request(header: &str, value: &[u8], path: &str) {
    let Ok(key) = SealKey::generate() else { return };
    let secret = |name: &str, fields: SecretFields| EgressSecret {
        name: name.into(),
        placeholder: format!("{PLACEHOLDER_MARK}{name}"),
        hosts: vec!["a.test:80".into()],
        fields,
        sealed: key.seal(&format!("secret {name}"), b"AKID:the-secret-value").unwrap_or_default(),
    };
    let headers = SecretFields { headers: vec!["x-api-key".into()], ..SecretFields::default() };
    let signing = SecretFields { sigv4: true, ..SecretFields::default() };
    let secrets = [secret("a", headers), secret("b", signing)];
    let secrets = SecretTable::open(&secrets, Some(&key));
    let Ok(built) = hyper::Request::get(path).header(header, value).header("x-amz-date", "1").body(()) else {
        return;
    };
    let mut parts = built.into_parts().0;
    let target = target();
    let mut injector = Injector::new(&secrets, &target);
    if injector.rewrite(&mut parts, &RequestPermit::default(), Some("00")).is_err() {
        return;
    }
    for (name, value) in &parts.headers {
        assert!(!has_placeholder(value.as_bytes()), "{name}: {value:?}");
        let has_value = memchr::memmem::find(value.as_bytes(), b"the-secret-value").is_some();
        assert!(!has_value || name == "x-api-key" || name == header, "{name}: {value:?}");
    }
    assert!(!has_placeholder(parts.uri.to_string().as_bytes()), "{}", parts.uri);
}

/// An answer in two cuts: no form of a value is in it.
pub fn mask(stream: &[u8], pieces: &[&[u8]]) {
    let value: &[u8] = b"abcabd";
    let mask = Mask::of([value]);
    for pieces in [&[stream][..], pieces] {
        let (mut out, mut held) = (Vec::new(), Vec::new());
        for (at, piece) in pieces.iter().enumerate() {
            held.extend_from_slice(piece);
            out.append(&mut mask.rewrite(&mut held, at + 1 == pieces.len()));
        }
        assert_eq!(out.len(), stream.len());
        assert!(memchr::memmem::find(&out, value).is_none());
    }
}

/// An address: its spelling as IPv6 is judged like itself.
pub fn address(octets: [u8; 4]) {
    let v4 = std::net::Ipv4Addr::from(octets);
    let is_inner = |address: IpAddr| crate::address::is_inner(address);
    assert_eq!(is_inner(v4.into()), is_inner(v4.to_ipv6_mapped().into()));
}

/// Messages to the ssh agent, each behind its length, and the same bytes as a key, as a signature and as known hosts.
pub fn ssh(input: &[u8]) {
    let mut messages = SshReader::new(input);
    ssh_agent::answer_without_keys(std::iter::from_fn(|| messages.string()));
    assert!(!verify(input, input, input));
    let Ok(text) = std::str::from_utf8(input) else { return };
    let _ = SshPrivateKey::parse(text);
    for known in known_hosts_of(text, "a.test") {
        assert_eq!(KnownHost::parse(&known.line()), Some(known));
    }
}
