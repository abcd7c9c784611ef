//! `Accept-Encoding` as envd reads it: gzip only for callers that ask for it by name.

use hyper::{HeaderMap, header};

/// The encoding in which a file is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    Identity,
    Gzip,
}

/// Picks the supported encoding of the highest quality; `Err` if the caller accepts none of them.
pub fn negotiate(headers: &HeaderMap, plain_only: bool) -> Result<Encoding, String> {
    let text = headers.get(header::ACCEPT_ENCODING).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let mut offers: Vec<(String, f64)> =
        text.split(',').filter(|offer| !offer.trim().is_empty()).map(offer).collect();
    let refused = |name: &str| offers.iter().any(|(offer, quality)| offer == name && *quality == 0.0);
    let named = offers.iter().any(|(offer, quality)| offer == "identity" && *quality > 0.0);
    let plain_refused = refused("identity") || refused("*") && !named;
    if plain_only {
        let message = "identity encoding not acceptable for Range or conditional request";
        return if plain_refused { Err(message.to_owned()) } else { Ok(Encoding::Identity) };
    }
    offers.sort_by(|one, other| other.1.total_cmp(&one.1));
    for (name, _) in offers.iter().filter(|(_, quality)| *quality > 0.0) {
        match name.as_str() {
            "gzip" => return Ok(Encoding::Gzip),
            "*" if plain_refused => return Ok(Encoding::Gzip),
            "identity" | "*" => return Ok(Encoding::Identity),
            _ => {}
        }
    }
    if plain_refused {
        Err("no acceptable encoding found, supported: [gzip]".to_owned())
    } else {
        Ok(Encoding::Identity)
    }
}

fn offer(text: &str) -> (String, f64) {
    let mut parts = text.split(';');
    let name = parts.next().unwrap_or_default().trim().to_ascii_lowercase();
    let quality =
        parts.find_map(|part| part.trim().to_ascii_lowercase().strip_prefix("q=").map(str::to_owned));
    (name, quality.and_then(|quality| quality.parse().ok()).unwrap_or(1.0))
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    #[test]
    fn gzip_must_be_asked_for() {
        let ask = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_str(text).unwrap());
            negotiate(&headers, false).ok()
        };
        use Encoding::{Gzip, Identity};
        for (text, wanted) in [
            ("", Some(Identity)),
            ("gzip", Some(Gzip)),
            ("br, GZIP;q=0.5", Some(Gzip)),
            ("identity", Some(Identity)),
            ("gzip;q=0.5, identity", Some(Identity)),
            ("*", Some(Identity)),
            ("gzip;q=0", Some(Identity)),
            ("br", Some(Identity)),
            ("identity;q=0", None),
            ("*;q=0", None),
            ("*, identity;q=0", Some(Gzip)),
        ] {
            assert_eq!(ask(text), wanted, "{text}");
        }
        assert_eq!(negotiate(&HeaderMap::new(), true), Ok(Identity));
    }
}
