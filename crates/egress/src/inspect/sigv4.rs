//! Signatures of AWS (Signature Version 4): the program signs with a placeholder, the host gets a signature of the real key.
//!
//! The scope, the time and the signed headers stay as the program chose them.
//! Absent on purpose: chunked signatures (`STREAMING-…`), signed URLs and SigV4A; requests with them are refused.

use std::fmt::Write;

use hmac::{Hmac, KeyInit, Mac};
use hyper::{
    HeaderMap, Version,
    header::{self, HeaderValue},
    http::request::Parts,
};
use sha2::{Digest, Sha256};

use super::request::authority;
use crate::{refusal::Denial, target::Target};

const ALGORITHM: &str = "AWS4-HMAC-SHA256";
const CONTENT_HASH: &str = "x-amz-content-sha256";
/// The header of a session token.
pub const TOKEN: &str = "x-amz-security-token";

/// A key of AWS.
struct AwsKey {
    id: String,
    secret: String,
    token: Option<String>,
}

/// The parts of the header `Authorization`.
struct Signature<'a> {
    /// `DATE/REGION/SERVICE/aws4_request`.
    scope: &'a str,
    signed: Vec<&'a str>,
}

/// Whether a header is a signature, whoever made it.
pub fn is_signature(authorization: &[u8]) -> bool {
    authorization.starts_with(ALGORITHM.as_bytes())
}

/// Whether the hash of the body must be computed: the head does not have it.
pub fn needs_body_hash(headers: &HeaderMap) -> bool {
    let signature = headers.get(header::AUTHORIZATION).is_some_and(|value| is_signature(value.as_bytes()));
    signature && !headers.contains_key(CONTENT_HASH)
}

/// The parts of a key that must not come back in an answer.
pub fn parts_of_key(value: &[u8]) -> Vec<Vec<u8>> {
    AwsKey::parse(value).map_or(Vec::new(), |key| {
        [Some(key.secret), key.token].into_iter().flatten().map(String::into_bytes).collect()
    })
}

impl AwsKey {
    /// Reads `ID:SECRET[:TOKEN]`, or the JSON that `aws configure export-credentials` prints.
    fn parse(value: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?.trim();
        if let Ok(json) = serde_json::from_str::<serde_json::Value>(text) {
            let field = |name: &str| json[name].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
            let (id, secret) = (field("AccessKeyId")?, field("SecretAccessKey")?);
            return Some(Self { id, secret, token: field("SessionToken") });
        }
        let mut parts = text.splitn(3, ':').map(str::to_owned);
        let (id, secret) = (parts.next()?, parts.next()?);
        (!id.is_empty() && !secret.is_empty()).then(|| Self { id, secret, token: parts.next() })
    }
}

/// Signs a request anew with the key in `value`. `body_hash` is the hash of its body, if the head has none.
pub fn sign(parts: &mut Parts, target: &Target, value: &[u8], body_hash: Option<&str>) -> Result<(), Denial> {
    let refused = |why: &str| Denial::forbidden(format!("its AWS signature cannot be made anew: {why}"));
    let key =
        AwsKey::parse(value).ok_or_else(|| refused("the secret is no `ID:SECRET` and no JSON of `aws`"))?;
    let held =
        parts.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let held = held.ok_or_else(|| refused("it is malformed"))?;
    let Signature { scope, mut signed } = parse(&held).ok_or_else(|| refused("it is malformed"))?;
    let hash = match parts.headers.get(CONTENT_HASH).map(|value| value.to_str().unwrap_or_default()) {
        Some(hash) if hash.starts_with("STREAMING-") => {
            return Err(refused("it signs each chunk of the body; turn that off in the program"));
        }
        Some(hash) => hash.to_owned(),
        None => body_hash.ok_or_else(|| refused("the hash of the body is unknown"))?.to_owned(),
    };
    let time = ["x-amz-date", "date"].into_iter().find_map(|name| parts.headers.get(name)?.to_str().ok());
    let time = time.ok_or_else(|| refused("it has no time"))?.to_owned();
    if let Some(token) = &key.token {
        let token =
            HeaderValue::from_str(token).map_err(|_| refused("the session token cannot be in a header"))?;
        parts.headers.insert(TOKEN, token);
        signed.push(TOKEN);
    } else {
        parts.headers.remove(TOKEN);
        signed.retain(|name| *name != TOKEN);
    }
    signed.sort_unstable();
    signed.dedup();
    let mut request = format!(
        "{}\n{}\n{}\n",
        parts.method,
        canonical_path(parts.uri.path(), scope),
        canonical_query(parts)
    );
    for name in &signed {
        let value = canonical_value(parts, target, name)
            .ok_or_else(|| refused("a header that it names is missing"))?;
        let _ = writeln!(request, "{name}:{value}");
    }
    let names = signed.join(";");
    let _ = write!(request, "\n{names}\n{hash}");
    let text = format!("{ALGORITHM}\n{time}\n{scope}\n{}", hex(&Sha256::digest(request)));
    let signature = hex(&hmac(&signing_key(&key.secret, scope), text.as_bytes()));
    let header =
        format!("{ALGORITHM} Credential={}/{scope}, SignedHeaders={names}, Signature={signature}", key.id);
    let mut header = HeaderValue::from_str(&header).map_err(|_| refused("the id of the key is malformed"))?;
    header.set_sensitive(true);
    parts.headers.insert(header::AUTHORIZATION, header);
    Ok(())
}

/// The SHA-256 of a body, in hexadecimal.
pub fn body_hash(body: &[u8]) -> String {
    hex(&Sha256::digest(body))
}

fn parse(authorization: &str) -> Option<Signature<'_>> {
    let fields = authorization.strip_prefix(ALGORITHM)?.trim().split(',').map(str::trim);
    let (mut scope, mut signed) = (None, None);
    for field in fields {
        match field.split_once('=')? {
            ("Credential", credential) => scope = credential.split_once('/').map(|(_, scope)| scope),
            ("SignedHeaders", names) => signed = Some(names.split(';').collect::<Vec<_>>()),
            _ => {}
        }
    }
    let scope = scope.filter(|scope| scope.split('/').count() == 4 && scope.ends_with("/aws4_request"))?;
    Some(Signature { scope, signed: signed? })
}

/// The path as it is signed: S3 signs the one that is sent, all others encode it once more.
fn canonical_path(path: &str, scope: &str) -> String {
    let is_s3 = scope.split('/').nth(2) == Some("s3");
    if is_s3 { path.to_owned() } else { path.split('/').map(encode).collect::<Vec<_>>().join("/") }
}

fn canonical_query(parts: &Parts) -> String {
    let pairs = parts.uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
    let mut pairs: Vec<(String, String)> = pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (encode_bytes(&decode(name)), encode_bytes(&decode(value)))
        })
        .collect();
    pairs.sort();
    pairs.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
}

/// The values of a signed header, with single blanks.
fn canonical_value(parts: &Parts, target: &Target, name: &str) -> Option<String> {
    // HTTP/2 names the host in its authority.
    if name == "host" && (parts.version == Version::HTTP_2 || !parts.headers.contains_key(header::HOST)) {
        return Some(authority(target));
    }
    let values = parts.headers.get_all(name).iter();
    let values: Option<Vec<String>> = values
        .map(|value| Some(value.to_str().ok()?.split_whitespace().collect::<Vec<_>>().join(" ")))
        .collect();
    values.filter(|values| !values.is_empty()).map(|values| values.join(","))
}

fn signing_key(secret: &str, scope: &str) -> Vec<u8> {
    let start = format!("AWS4{secret}").into_bytes();
    scope.split('/').fold(start, |key, part| hmac(&key, part.as_bytes()))
}

fn hmac(key: &[u8], text: &[u8]) -> Vec<u8> {
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return Vec::new() };
    mac.update(text);
    mac.finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn encode(text: &str) -> String {
    encode_bytes(text.as_bytes())
}

fn encode_bytes(bytes: &[u8]) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    bytes.iter().fold(String::new(), |mut text, byte| {
        if plain(*byte) {
            text.push(char::from(*byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
        text
    })
}

/// Decodes percent signs; those that encode nothing stay.
fn decode(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let (mut done, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let encoded = (bytes[at] == b'%').then(|| text.get(at + 1..at + 3)).flatten();
        match encoded.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                done.push(byte);
                at += 3;
            }
            None => {
                done.push(bytes[at]);
                at += 1;
            }
        }
    }
    done
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;
    use crate::target::Host;

    const KEY: &[u8] = b"AKIDEXAMPLE:wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";
    const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn target(host: &str) -> Target {
        Target { host: Host::Name(host.into()), port: 443 }
    }

    /// Signs with a placeholder as a program does, and then anew; returns the header.
    fn signed(
        parts: &mut Parts,
        host: &str,
        scope: &str,
        names: &str,
        key: &[u8],
        hash: Option<&str>,
    ) -> Result<String, Denial> {
        let held = format!("{ALGORITHM} Credential=palph0aaaa/{scope}, SignedHeaders={names}, Signature=00");
        parts.headers.insert(header::AUTHORIZATION, held.parse().unwrap());
        sign(parts, &target(host), key, hash)?;
        Ok(parts.headers[header::AUTHORIZATION].to_str().unwrap().to_owned())
    }

    fn get(uri: &str, host: &str, time: &str) -> Parts {
        Request::get(uri).header("host", host).header("x-amz-date", time).body(()).unwrap().into_parts().0
    }

    /// The vectors of AWS' test suite for Signature Version 4: get-vanilla, get-vanilla-query-order-key-case,
    /// post-vanilla, get-header-value-trim.
    #[test]
    fn the_vectors_of_aws_are_met() {
        let (host, time, scope) =
            ("example.amazonaws.com", "20150830T123600Z", "20150830/us-east-1/service/aws4_request");
        let of =
            |mut parts: Parts, names: &str| signed(&mut parts, host, scope, names, KEY, Some(EMPTY)).unwrap();
        let ends = |header: String, signature: &str| assert!(header.ends_with(signature), "{header}");
        ends(
            of(get("/", host, time), "host;x-amz-date"),
            "Signature=5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
        );
        ends(
            of(get("/?Param2=value2&Param1=value1", host, time), "host;x-amz-date"),
            "Signature=b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
        );
        let mut post = get("/", host, time);
        post.method = hyper::Method::POST;
        ends(
            of(post, "host;x-amz-date"),
            "Signature=5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b",
        );
        let mut trimmed = get("/", host, time);
        trimmed.headers.insert("my-header1", " value1".parse().unwrap());
        trimmed.headers.insert("my-header2", " \"a   b   c\"".parse().unwrap());
        ends(
            of(trimmed, "host;my-header1;my-header2;x-amz-date"),
            "Signature=acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736",
        );
    }

    /// The example of the documentation of S3, GET Object.
    #[test]
    fn the_example_of_s3_is_met() {
        let host = "examplebucket.s3.amazonaws.com";
        let mut parts = get("/test.txt", host, "20130524T000000Z");
        parts.headers.insert("range", "bytes=0-9".parse().unwrap());
        parts.headers.insert(CONTENT_HASH, EMPTY.parse().unwrap());
        let key = b"AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";
        let scope = "20130524/us-east-1/s3/aws4_request";
        let header =
            signed(&mut parts, host, scope, "host;range;x-amz-content-sha256;x-amz-date", key, None).unwrap();
        assert_eq!(
            header,
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, \
             SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, \
             Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        );
    }

    #[test]
    fn a_session_token_is_set_and_signed() {
        let (host, scope) = ("sts.amazonaws.com", "20150830/us-east-1/sts/aws4_request");
        let mut parts = get("/", host, "20150830T123600Z");
        let key =
            br#"{"Version": 1, "AccessKeyId": "ASIA", "SecretAccessKey": "s", "SessionToken": "the-token"}"#;
        let header = signed(&mut parts, host, scope, "host;x-amz-date", key, Some(EMPTY)).unwrap();
        assert!(
            header.contains("Credential=ASIA/")
                && header.contains("SignedHeaders=host;x-amz-date;x-amz-security-token")
        );
        assert_eq!(parts.headers[TOKEN], "the-token");
        assert_eq!(parts_of_key(key), [b"s".to_vec(), b"the-token".to_vec()]);
        parts.headers.insert(CONTENT_HASH, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD".parse().unwrap());
        assert!(signed(&mut parts, host, scope, "host", key, None).is_err());
    }

    #[test]
    fn odd_signatures_are_refused() {
        let host = "sts.amazonaws.com";
        for (scope, names, key) in [
            ("20150830/us-east-1/sts", "host", KEY),
            ("20150830/us-east-1/sts/aws4_request", "host;x-missing", KEY),
            ("20150830/us-east-1/sts/aws4_request", "host", b"no colon"),
        ] {
            let mut parts = get("/", host, "20150830T123600Z");
            assert!(signed(&mut parts, host, scope, names, key, Some(EMPTY)).is_err(), "{scope} {names}");
        }
        assert_eq!(decode("a%2Fb%zz%"), b"a/b%zz%");
    }
}
