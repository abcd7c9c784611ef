//! Authorization of requests: the access token, signed file URLs, and the user that a caller names.

use base64::{
    Engine,
    engine::general_purpose::{STANDARD, STANDARD_NO_PAD},
};
use hyper::{HeaderMap, Method, StatusCode, header};
use sha2::{Digest, Sha256};

use crate::{query::UrlQuery, reply::PlainRefusal};

/// The operation that a signed URL allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignedOperation {
    Read,
    Write,
}

impl SignedOperation {
    fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// Checks the access token of a request. `/health` needs none, and `/files` has its own check ([`check_files`]).
pub fn check_token(
    token: Option<&str>,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
) -> Result<(), PlainRefusal> {
    let Some(token) = token else { return Ok(()) };
    let excluded = path == "/health" && method == Method::GET
        || path == "/files" && (method == Method::GET || method == Method::POST);
    if excluded || sent_token(headers).is_some_and(|sent| constant_time_eq(sent, token.as_bytes())) {
        return Ok(());
    }
    Err(unauthorized(
        "unauthorized access, please provide a valid access token or method signing if supported",
    ))
}

/// Checks that a `/files` request carries the access token or a signature of exactly this request.
pub fn check_files(
    token: Option<&str>,
    headers: &HeaderMap,
    query: &UrlQuery,
    operation: SignedOperation,
    now_unix_s: i64,
) -> Result<(), PlainRefusal> {
    let Some(token) = token else { return Ok(()) };
    match sent_token(headers) {
        Some(sent) if constant_time_eq(sent, token.as_bytes()) => return Ok(()),
        Some(sent) if !sent.is_empty() => {
            return Err(unauthorized("access token present in header but does not match"));
        }
        _ => {}
    }
    let signature =
        query.bytes("signature").ok_or_else(|| unauthorized("missing signature query parameter"))?;
    let expiration: Option<i64> = match query.text("signature_expiration") {
        None => None,
        Some(text) => {
            Some(text.parse().map_err(|_| PlainRefusal::bad("signature_expiration is not a number"))?)
        }
    };
    let path = query.bytes("path").unwrap_or_default();
    let expected = sign(path, operation, query.bytes("username").unwrap_or_default(), token, expiration);
    if !constant_time_eq(signature, expected.as_bytes()) {
        return Err(unauthorized("invalid signature"));
    }
    if expiration.is_some_and(|at| at < now_unix_s) {
        return Err(unauthorized("signature is already expired"));
    }
    Ok(())
}

/// The user name in Basic authorization.
pub fn basic_user(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, encoded) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = STANDARD.decode(encoded.trim()).ok()?;
    let text = String::from_utf8(decoded).ok()?;
    text.split_once(':').map(|(user, _)| user.to_owned())
}

fn sent_token(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get("x-access-token").map(|value| value.as_bytes())
}

fn sign(
    path: &[u8],
    operation: SignedOperation,
    user: &[u8],
    token: &str,
    expiration: Option<i64>,
) -> String {
    let mut text = [path, operation.word().as_bytes(), user, token.as_bytes()].join(&b':');
    if let Some(at) = expiration {
        text.extend_from_slice(format!(":{at}").as_bytes());
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(&text)))
}

/// Compares all bytes even after a difference, so that the time taken reveals only the length.
fn constant_time_eq(one: &[u8], other: &[u8]) -> bool {
    let differs =
        one.iter().zip(other).fold(0, |differs, (one, other)| std::hint::black_box(differs | one ^ other));
    one.len() == other.len() && differs == 0
}

fn unauthorized(message: &str) -> PlainRefusal {
    PlainRefusal::new(StatusCode::UNAUTHORIZED, message)
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn ask(query: &str, header: Option<&str>) -> Result<(), String> {
        let mut headers = HeaderMap::new();
        if let Some(token) = header {
            headers.insert("x-access-token", HeaderValue::from_str(token).unwrap());
        }
        let query = UrlQuery::parse(Some(query));
        check_files(Some("tok"), &headers, &query, SignedOperation::Read, 1000)
            .map_err(|refusal| refusal.message)
    }

    #[test]
    fn signatures_are_those_of_the_sdk() {
        // python: "v1_" + b64(sha256(b"a b:read:user:tok")) without padding
        let plain = sign(b"a b", SignedOperation::Read, b"user", "tok", None);
        assert_eq!(plain.len(), 3 + 43);
        assert_eq!(
            ask(&format!("path=a+b&username=user&signature={}", plain.replace('+', "%2B")), None),
            Ok(())
        );
        let later = sign(b"p", SignedOperation::Read, b"", "tok", Some(1000)).replace('+', "%2B");
        assert_eq!(ask(&format!("path=p&signature={later}&signature_expiration=1000"), None), Ok(()));
        let past = sign(b"p", SignedOperation::Read, b"", "tok", Some(999)).replace('+', "%2B");
        let expired = Err("signature is already expired".to_owned());
        assert_eq!(ask(&format!("path=p&signature={past}&signature_expiration=999"), None), expired);
        let invalid = Err("invalid signature".to_owned());
        assert_eq!(ask(&format!("path=q&signature={later}&signature_expiration=1000"), None), invalid);
    }

    #[test]
    fn files_take_the_token_too() {
        assert_eq!(ask("path=p", Some("tok")), Ok(()));
        let wrong = Err("access token present in header but does not match".to_owned());
        assert_eq!(ask("path=p", Some("nope")), wrong);
        assert_eq!(ask("path=p", None), Err("missing signature query parameter".to_owned()));
    }

    #[test]
    fn the_user_is_the_first_part_of_basic() {
        let mut headers = HeaderMap::new();
        assert_eq!(basic_user(&headers), None);
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static("Basic cm9vdDo="));
        assert_eq!(basic_user(&headers), Some("root".to_owned()));
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static("Bearer cm9vdDo="));
        assert_eq!(basic_user(&headers), None);
    }
}
