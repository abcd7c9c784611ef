//! The judgement of one request on an inspected connection, and its secrets.
//!
//! Invariant: a request goes to the host that its connection was judged for, with one reading of its authority.
//! Invariant: no placeholder leaves the Body in a head; it is replaced where its secret says, or the request is refused.

use std::rc::Rc;

use base64::{Engine, engine::general_purpose::STANDARD};
use hyper::{
    HeaderMap, Method, Uri, Version,
    header::{self, HeaderName, HeaderValue},
    http::{request, uri::PathAndQuery},
};
use proto::egress::{RequestPermit, RequestTarget, fit_to_show};

use super::sigv4;
use crate::{
    http_head::METHOD_OVERRIDES,
    refusal::Denial,
    secrets::{OpenSecret, SecretTable, has_placeholder, replace_all},
    target::{Host, Target},
};

const HTTPS_PORT: u16 = 443;
/// The status of a request for another host.
const MISDIRECTED: u16 = 421;
/// Headers of one connection, and those that the proxy answers itself.
const NOT_PASSED: &[&str] =
    &["expect", "http2-settings", "keep-alive", "proxy-authorization", "proxy-connection", "trailer"];

/// The secrets of a connection, and how a request uses them.
pub struct Injector<'a> {
    secrets: &'a SecretTable,
    target: &'a Target,
    /// The secrets whose values the request has.
    pub used: Vec<Rc<OpenSecret>>,
    /// The key of AWS with which the request is signed anew.
    signer: Option<Rc<OpenSecret>>,
}

/// Checks that a request is for the target, and returns its authority as the host gets it.
pub fn check_authority(parts: &request::Parts, target: &Target) -> Result<(), Denial> {
    if parts.method == Method::CONNECT {
        return Err(Denial::forbidden("a tunnel inside TLS is not allowed"));
    }
    let mut hosts: Vec<String> = Vec::new();
    for host in parts.headers.get_all(header::HOST) {
        hosts.push(host.to_str().map_err(|_| Denial::bad("its Host header is malformed"))?.to_owned());
    }
    if hosts.len() > 1 {
        return Err(Denial::bad("it has several Host headers"));
    }
    hosts.extend(parts.uri.authority().map(ToString::to_string));
    if hosts.is_empty() {
        return Err(Denial::bad("it names no host"));
    }
    match hosts.iter().find(|host| !target.is_called(host)) {
        Some(other) => Err(Denial {
            status: MISDIRECTED,
            why: format!("its request is for the host {}", fit_to_show(other)),
        }),
        None => Ok(()),
    }
}

/// The parts of a request that rules judge; `headers` are its [judged headers](judged_headers).
pub fn request_target<'a>(
    parts: &'a request::Parts,
    headers: &'a [(&'a str, &'a [u8])],
) -> Result<RequestTarget<'a>, Denial> {
    if METHOD_OVERRIDES.iter().any(|name| parts.headers.contains_key(*name)) {
        return Err(Denial::forbidden("a header of it asks for another method"));
    }
    let (method, path, query) = (parts.method.as_str(), parts.uri.path(), parts.uri.query());
    Ok(RequestTarget { method, path, query, headers })
}

/// The headers of a request, as rules judge them.
pub fn judged_headers(parts: &request::Parts) -> Vec<(&str, &[u8])> {
    parts.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect()
}

/// Gives a request the head that the host gets to which its rule sends it.
pub fn readdress(parts: &mut request::Parts, original: &Target, destination: &Target) -> Result<(), Denial> {
    let value = |text: String| HeaderValue::try_from(text).map_err(|_| Denial::bad("its host is malformed"));
    parts.headers.remove(header::HOST);
    if parts.version < Version::HTTP_2 {
        parts.headers.insert(header::HOST, value(authority(destination))?);
    }
    parts.headers.insert(header::FORWARDED, value(original.forwarded(HTTPS_PORT))?);
    Ok(())
}

impl<'a> Injector<'a> {
    pub fn new(secrets: &'a SecretTable, target: &'a Target) -> Self {
        Self { secrets, target, used: Vec::new(), signer: None }
    }

    /// Writes the head that the host gets: the headers of the rule, the values of secrets, nothing of the connection.
    /// `body_hash` is the hash of the body, if a signature needs it.
    pub fn rewrite(
        &mut self,
        parts: &mut request::Parts,
        permit: &RequestPermit,
        body_hash: Option<&str>,
    ) -> Result<(), Denial> {
        for name in NOT_PASSED {
            parts.headers.remove(*name);
        }
        if parts.headers.get(header::TE).is_some_and(|value| value != "trailers") {
            parts.headers.remove(header::TE);
        }
        let mut headers = HeaderMap::with_capacity(parts.headers.len());
        for (name, value) in &parts.headers {
            let is_set = permit.set_headers.keys().any(|own| own.eq_ignore_ascii_case(name.as_str()));
            if !is_set {
                headers.append(name.clone(), self.header(name, value)?);
            }
        }
        for (name, value) in &permit.set_headers {
            let (name, value) = self.set_header(name, value)?;
            headers.insert(name, value);
        }
        parts.headers = headers;
        if self.secrets.iter().any(|secret| secret.value_for(self.target).is_ok()) {
            // A compressed answer could not be searched for a value.
            parts.headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        parts.uri = self.uri(&parts.uri, parts.version)?;
        // The signature covers the head as it goes out.
        match self.signer.take() {
            Some(secret) => {
                let value = secret.value_for(self.target).map_err(Denial::forbidden)?;
                sigv4::sign(parts, self.target, value, body_hash)
            }
            None => Ok(()),
        }
    }

    fn header(&mut self, name: &HeaderName, value: &HeaderValue) -> Result<HeaderValue, Denial> {
        if *name == header::AUTHORIZATION
            && let Some(replaced) = self.basic(value.as_bytes())?
        {
            return Ok(replaced);
        }
        if !has_placeholder(value.as_bytes()) {
            return Ok(value.clone());
        }
        if let Some(secret) = self.aws_key(name, value.as_bytes()) {
            self.note(&secret);
            self.signer = Some(secret);
            return Ok(value.clone());
        }
        let text = self.replace(
            value.as_bytes(),
            |secret| secret.is_for_header(name.as_str()),
            |value| value.to_vec(),
        )?;
        check_replaced(&text, &format!("the header {name}"))?;
        sensitive(&text)
    }

    /// The key of AWS whose placeholder is in a signature or in a session token.
    fn aws_key(&self, name: &HeaderName, value: &[u8]) -> Option<Rc<OpenSecret>> {
        let is_token = *name == sigv4::TOKEN;
        let is_signature = *name == header::AUTHORIZATION && sigv4::is_signature(value);
        if !is_token && !is_signature {
            return None;
        }
        let named = |secret: &&Rc<OpenSecret>| {
            secret.fields.sigv4 && memchr::memmem::find(value, secret.placeholder.as_bytes()).is_some()
        };
        self.secrets.iter().find(named).cloned()
    }

    /// The header of a user and a password, if a placeholder is in it.
    fn basic(&mut self, value: &[u8]) -> Result<Option<HeaderValue>, Denial> {
        let Some((scheme, encoded)) = value.split_at_checked(6) else { return Ok(None) };
        if !scheme.eq_ignore_ascii_case(b"basic ") {
            return Ok(None);
        }
        let Ok(decoded) = STANDARD.decode(encoded.trim_ascii()) else { return Ok(None) };
        if !has_placeholder(&decoded) {
            return Ok(None);
        }
        let text = self.replace(&decoded, |secret| secret.fields.basic, |value| value.to_vec())?;
        check_replaced(&text, "a password")?;
        sensitive(format!("Basic {}", STANDARD.encode(text)).as_bytes()).map(Some)
    }

    /// A header of a rule, with the values of the secrets that it names as `${NAME}`.
    fn set_header(&mut self, name: &str, value: &str) -> Result<(HeaderName, HeaderValue), Denial> {
        let broken = |why: String| Denial::forbidden(format!("its rule sets the header {name}: {why}"));
        let mut text = Vec::new();
        let mut rest = value;
        while let Some((front, behind)) = rest.split_once("${") {
            text.extend_from_slice(front.as_bytes());
            let (named, behind) = behind.split_once('}').ok_or_else(|| broken("a `${` has no end".into()))?;
            let secret = self.secrets.find(named).cloned();
            let secret =
                secret.ok_or_else(|| broken(format!("the Body has no secret {}", fit_to_show(named))))?;
            text.extend_from_slice(secret.value_for(self.target).map_err(broken)?);
            self.note(&secret);
            rest = behind;
        }
        text.extend_from_slice(rest.as_bytes());
        let name = name.parse().map_err(|_| broken("it is no name of a header".into()))?;
        Ok((name, sensitive(&text)?))
    }

    /// The URI that the host gets: a path for HTTP/1, and a whole URL for HTTP/2.
    fn uri(&mut self, uri: &Uri, version: Version) -> Result<Uri, Denial> {
        if has_placeholder(uri.path().as_bytes()) {
            return Err(Denial::forbidden("a placeholder of a secret is in its path, where no secret goes"));
        }
        let malformed = || Denial::bad("its URL is malformed");
        let query = match uri.query() {
            Some(query) if has_placeholder(query.as_bytes()) => {
                let text = self.replace(query.as_bytes(), |secret| secret.fields.query, percent_encoded)?;
                check_replaced(&text, "the query")?;
                Some(String::from_utf8(text).map_err(|_| malformed())?)
            }
            query => query.map(str::to_owned),
        };
        let path = match query {
            Some(query) => format!("{}?{query}", uri.path()),
            None => uri.path().to_owned(),
        };
        let path: PathAndQuery = path.parse().map_err(|_| malformed())?;
        let mut built = Uri::builder().path_and_query(path);
        if version == Version::HTTP_2 {
            built = built.scheme("https").authority(authority(self.target));
        }
        built.build().map_err(|_| malformed())
    }

    /// Replaces the placeholders in a part of the request for which `may_stand` holds.
    pub fn replace(
        &mut self,
        text: &[u8],
        may_stand: impl Fn(&OpenSecret) -> bool,
        written: impl Fn(&[u8]) -> Vec<u8>,
    ) -> Result<Vec<u8>, Denial> {
        let mut text = text.to_vec();
        for secret in self.secrets.iter() {
            let placeholder = secret.placeholder.as_bytes();
            if !may_stand(secret) || memchr::memmem::find(&text, placeholder).is_none() {
                continue;
            }
            let value = secret.value_for(self.target).map_err(Denial::forbidden)?;
            text = replace_all(&text, placeholder, &written(value));
            self.note(secret);
        }
        Ok(text)
    }

    fn note(&mut self, secret: &Rc<OpenSecret>) {
        if !self.used.iter().any(|used| Rc::ptr_eq(used, secret)) {
            self.used.push(Rc::clone(secret));
        }
    }
}

/// The name of the target, as a URL has it.
pub fn authority(target: &Target) -> String {
    match &target.host {
        Host::Name(name) if target.port == HTTPS_PORT => name.clone(),
        _ => target.to_string(),
    }
}

fn check_replaced(text: &[u8], part: &str) -> Result<(), Denial> {
    match has_placeholder(text) {
        true => Err(Denial::forbidden(format!(
            "a placeholder is in {part}, where its secret does not go, or the Body has no such secret"
        ))),
        false => Ok(()),
    }
}

fn percent_encoded(value: &[u8]) -> Vec<u8> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let written = value.iter().map(|byte| match plain(*byte) {
        true => char::from(*byte).to_string(),
        false => format!("%{byte:02X}"),
    });
    written.collect::<String>().into_bytes()
}

/// A value that HTTP/2 does not keep in its tables.
fn sensitive(text: &[u8]) -> Result<HeaderValue, Denial> {
    let mut value = HeaderValue::from_bytes(text)
        .map_err(|_| Denial::forbidden("the value of its secret cannot be in a header: it has a line end"))?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use hyper::Request;
    use proto::egress::SecretFields;

    use super::*;
    use crate::secrets::tests::{secret, table};

    fn target() -> Target {
        Target { host: Host::Name("api.test".into()), port: 443 }
    }

    fn parts(request: request::Builder) -> request::Parts {
        request.body(()).unwrap().into_parts().0
    }

    fn fields(headers: &[&str]) -> SecretFields {
        SecretFields {
            headers: headers.iter().map(|name| (*name).to_owned()).collect(),
            ..Default::default()
        }
    }

    #[test]
    fn a_request_is_for_its_target_only() {
        let check = |request: request::Builder| check_authority(&parts(request), &target());
        let get = |uri: &str| Request::get(uri);
        assert!(check(get("/").header("host", "API.test")).is_ok());
        assert!(check(get("https://api.test/")).is_ok());
        assert!(check(get("https://api.test/").header("host", "api.test:443")).is_ok());
        for bad in [
            get("/"),
            get("/").header("host", "evil.io"),
            get("/").header("host", "api.test:80"),
            get("/").header("host", "api.test").header("host", "api.test"),
            get("https://evil.io/").header("host", "api.test"),
            get("https://api.test/").header("host", "evil.io"),
            get("https://user@api.test/"),
            Request::connect("api.test:443"),
        ] {
            let shown = format!("{bad:?}");
            assert!(check(bad).is_err(), "{shown}");
        }
        let other = parts(get("/").header("x-http-method-override", "DELETE"));
        assert!(request_target(&other, &[]).is_err());
    }

    /// Rewrites a request that may use the secrets `key` and `pass`, and a placeholder of no secret of the Body.
    fn rewritten(
        request: request::Builder,
        permit: &RequestPermit,
    ) -> Result<(request::Parts, Vec<String>), Denial> {
        let secrets = table(vec![
            secret(
                "key",
                &["api.test"],
                SecretFields { query: true, ..fields(&["x-api-key", "authorization"]) },
            ),
            secret("pass", &["api.test"], SecretFields { basic: true, ..fields(&[]) }),
            secret("other", &["other.test"], fields(&["x-api-key"])),
        ]);
        let target = target();
        let mut parts = parts(request.header("host", "api.test"));
        let mut injector = Injector::new(&secrets, &target);
        injector.rewrite(&mut parts, permit, None)?;
        let used = injector.used.iter().map(|secret| secret.name.clone()).collect();
        Ok((parts, used))
    }

    #[test]
    fn placeholders_become_values_where_their_secrets_say() {
        let none = RequestPermit::default();
        let (parts, used) = rewritten(
            Request::get("/v1?k=key-palph0aaaa&x=1")
                .header("authorization", "Bearer key-palph0aaaa")
                .header("X-API-Key", "key-palph0aaaa")
                .header("accept-encoding", "gzip")
                .header("proxy-authorization", "x"),
            &none,
        )
        .unwrap();
        assert_eq!(parts.headers["authorization"], "Bearer value-of-key");
        assert_eq!(parts.headers["x-api-key"], "value-of-key");
        assert_eq!(parts.headers["accept-encoding"], "identity");
        assert!(
            parts.headers["authorization"].is_sensitive()
                && !parts.headers.contains_key("proxy-authorization")
        );
        assert_eq!((parts.uri.to_string(), used), ("/v1?k=value-of-key&x=1".into(), vec!["key".to_owned()]));
        let basic = STANDARD.encode("me:pass-palph0aaaa");
        let (parts, _) =
            rewritten(Request::get("/").header("authorization", format!("basic {basic}")), &none).unwrap();
        assert_eq!(
            parts.headers["authorization"],
            format!("Basic {}", STANDARD.encode("me:value-of-pass")).as_str()
        );
        let (parts, used) = rewritten(Request::get("/").header("accept-encoding", "gzip"), &none).unwrap();
        assert_eq!((parts.headers["accept-encoding"].as_bytes(), used.len()), (&b"identity"[..], 0));
    }

    #[test]
    fn a_signature_of_aws_is_made_with_the_real_key() {
        let aws = secret("aws", &["**.amazonaws.test"], SecretFields { sigv4: true, ..fields(&[]) });
        let secrets = table(vec![aws]);
        let sign = |host: &str| {
            let target = Target { host: Host::Name(host.into()), port: 443 };
            let held = "AWS4-HMAC-SHA256 Credential=aws-palph0aaaa/20260101/eu-west-1/s3/aws4_request, \
                        SignedHeaders=host;x-amz-date, Signature=00";
            let request = Request::get("/").header("host", host).header("x-amz-date", "20260101T000000Z");
            let mut parts = parts(request.header("authorization", held));
            Injector::new(&secrets, &target).rewrite(&mut parts, &RequestPermit::default(), Some("00"))
        };
        // The value of the secret in tests has no colon, so it is no key.
        let why = sign("s3.amazonaws.test").unwrap_err().why;
        assert!(why.contains("no `ID:SECRET`"), "{why}");
        assert!(sign("evil.io").unwrap_err().why.contains("does not belong to"));
    }

    #[test]
    fn a_placeholder_anywhere_else_refuses_the_request() {
        let none = RequestPermit::default();
        let key = "key-palph0aaaa";
        let basic = |text: &str| format!("Basic {}", STANDARD.encode(text));
        for bad in [
            Request::get("/").header("user-agent", key),
            Request::get("/").header("x-api-key", "palph0zzzz"),
            Request::get("/").header("x-api-key", "other-palph0aaaa"),
            Request::get("/").header("authorization", basic(&format!("me:{key}"))),
            Request::get("/").header("authorization", "Bearer pass-palph0aaaa"),
            Request::get("/?q=pass-palph0aaaa"),
            Request::get(format!("/{key}")),
        ] {
            let shown = format!("{bad:?}");
            assert!(rewritten(bad, &none).is_err(), "{shown}");
        }
    }

    #[test]
    fn a_rule_sets_headers_with_values_of_secrets() {
        let permit = |value: &str| RequestPermit {
            set_headers: [("Authorization".to_owned(), value.to_owned())].into(),
            ..RequestPermit::default()
        };
        let request = || Request::get("/").header("authorization", "its own");
        let (parts, used) = rewritten(request(), &permit("Bearer ${key}.")).unwrap();
        assert_eq!(parts.headers.get_all("authorization").iter().count(), 1);
        assert_eq!(
            (&parts.headers["authorization"], used),
            (&"Bearer value-of-key.".parse().unwrap(), vec!["key".into()])
        );
        for bad in ["${other}", "${none}", "${key"] {
            assert!(rewritten(request(), &permit(bad)).is_err(), "{bad}");
        }
    }
}
