//! TLS: with a given certificate, or with one of an authority that the server makes for itself.
//!
//! The data directory keeps the authority as `tls-ca.pem` and `tls-ca.key`, so that clients need to trust it only
//! once, and the certificate that it signed as `tls.pem` and `tls.key`. The certificate is valid for `localhost`, the
//! domain of ports and its subdomains, and the address that the server listens on.
//!
//! Invariant: the authority can sign for the names of this server alone, so a stolen `tls-ca.key` opens nothing else
//! of a person who trusts it.

use std::{
    fs, io,
    net::IpAddr,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use proto::{Failure, Kind};
use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose, NameConstraints,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use serde::{Deserialize, Serialize};
use tokio_rustls::TlsAcceptor;

use crate::ServerConfig;

/// The encryption of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Tls {
    /// No encryption.
    #[default]
    Off,
    /// TLS with a certificate of the server's own authority.
    SelfMade,
    /// TLS with this certificate chain and key, in PEM.
    Given {
        /// The certificate chain.
        cert: PathBuf,
        /// Its private key.
        key: PathBuf,
    },
}

/// The name of HTTP/2 in a TLS handshake.
pub const HTTP_2: &[u8] = b"h2";

const CA_CERT: &str = "tls-ca.pem";
const CA_KEY: &str = "tls-ca.key";
const CERT: &str = "tls.pem";
const KEY: &str = "tls.key";
const RECORD: &str = "tls.json";

const DAY: Duration = Duration::from_secs(24 * 3600);
/// Clocks of clients may be behind.
const CLOCK_SKEW: Duration = DAY;
const CA_LIFETIME: Duration = Duration::from_secs(3650 * 24 * 3600);
/// Clients of Apple accept at most 825 days.
const LIFETIME: Duration = Duration::from_secs(820 * 24 * 3600);
/// A start of the server renews a certificate that is valid for less time than this.
const LIFETIME_LEFT_MIN: Duration = Duration::from_secs(400 * 24 * 3600);

/// Accepts encrypted connections.
#[derive(Clone)]
pub struct Acceptor(pub TlsAcceptor);

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Acceptor")
    }
}

/// The acceptor of TLS connections, if the configuration asks for TLS.
pub fn acceptor(config: &ServerConfig, data: &Path) -> Result<Option<Acceptor>, Failure> {
    let (cert, key) = match &config.tls {
        Tls::Off => return Ok(None),
        Tls::Given { cert, key } => (cert.clone(), key.clone()),
        Tls::SelfMade => {
            make_current(data, &names(config), SystemTime::now())?;
            (data.join(CERT), data.join(KEY))
        }
    };
    let chain: Vec<CertificateDer> = CertificateDer::pem_file_iter(&cert)
        .and_then(|chain| chain.collect())
        .map_err(|error| unusable("certificate", &cert, error))?;
    let private = PrivateKeyDer::from_pem_file(&key).map_err(|error| unusable("key", &key, error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let built = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private));
    let mut built = built.map_err(|error| unusable("certificate", &cert, error))?;
    built.alpn_protocols = vec![HTTP_2.to_vec(), b"http/1.1".to_vec()];
    Ok(Some(Acceptor(TlsAcceptor::from(Arc::new(built)))))
}

/// The certificate of the authority that clients must trust, if the server uses one of its own.
pub fn certificate(config: &ServerConfig) -> Option<PathBuf> {
    (config.tls == Tls::SelfMade).then(|| config.fleet.data.join(CA_CERT))
}

fn unusable(what: &str, path: &Path, error: impl std::error::Error + Send + Sync + 'static) -> Failure {
    Failure::new(Kind::Usage, format!("the {what} in {} cannot be used", path.display()))
        .because(error)
        .hint("give both in PEM: pal serve --tls --cert FILE --key FILE")
}

/// The contents of the files of the authority and its certificate.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CertificateRecord {
    /// The name of the authority.
    authority: String,
    /// The names that the authority may sign for.
    authority_names: Vec<String>,
    /// The end of the authority, in seconds since 1970.
    authority_ends: u64,
    /// The names of the certificate.
    names: Vec<String>,
    /// The end of the certificate, in seconds since 1970.
    ends: u64,
}

/// Makes the authority and the certificate, as far as those in the data directory do not serve any longer.
fn make_current(data: &Path, names: &[String], now: SystemTime) -> Result<(), Failure> {
    let renew_before = unix_s(now + LIFETIME_LEFT_MIN);
    let record = read_record(data);
    if record.as_ref().is_some_and(|record| record.names == names && record.ends > renew_before) {
        return Ok(());
    }
    let covers = |record: &CertificateRecord| {
        record.authority_ends > unix_s(now + LIFETIME)
            && names.iter().all(|name| record.authority_names.contains(name))
    };
    let kept = record.filter(covers).and_then(|record| Some((read_key(&data.join(CA_KEY))?, record)));
    let (key, authority) = match kept {
        Some(kept) => kept,
        None => make_authority(data, names, now)?,
    };
    let issuer = Issuer::new(authority_params(&authority, now)?, key);
    let leaf_key = KeyPair::generate().map_err(cannot_make)?;
    let leaf = leaf_params(names, now).and_then(|params| params.signed_by(&leaf_key, &issuer));
    let leaf = leaf.map_err(cannot_make)?;
    write_private(&data.join(KEY), &leaf_key.serialize_pem()).map_err(cannot_write)?;
    sys::fd::write_whole(&data.join(CERT), leaf.pem().as_bytes()).map_err(cannot_write)?;
    let record = CertificateRecord { names: names.to_vec(), ends: unix_s(now + LIFETIME), ..authority };
    // Written last: without this file, the next start makes everything again.
    let text = serde_json::to_vec_pretty(&record).unwrap_or_default();
    sys::fd::write_whole(&data.join(RECORD), &text).map_err(cannot_write)
}

/// The record of complete files; none if one is missing.
fn read_record(data: &Path) -> Option<CertificateRecord> {
    let all = [CA_CERT, CA_KEY, CERT, KEY].iter().all(|file| data.join(file).exists());
    let text = all.then(|| fs::read_to_string(data.join(RECORD)).ok())??;
    serde_json::from_str(&text).ok()
}

fn read_key(path: &Path) -> Option<KeyPair> {
    KeyPair::from_pem(&fs::read_to_string(path).ok()?).ok()
}

fn make_authority(
    data: &Path,
    names: &[String],
    now: SystemTime,
) -> Result<(KeyPair, CertificateRecord), Failure> {
    let system = rustix::system::uname();
    let host = proto::text::visible(&system.nodename().to_string_lossy());
    let date = fleet::clock::rfc3339(now).chars().take(10).collect::<String>();
    let record = CertificateRecord {
        authority: format!("Palisade at {} ({date})", host.chars().take(40).collect::<String>()),
        authority_names: names.to_vec(),
        authority_ends: unix_s(now + CA_LIFETIME),
        names: Vec::new(),
        ends: 0,
    };
    // A record of earlier files must not describe the new ones.
    let _ = fs::remove_file(data.join(RECORD));
    let key = KeyPair::generate().map_err(cannot_make)?;
    let made = authority_params(&record, now)?.self_signed(&key).map_err(cannot_make)?;
    write_private(&data.join(CA_KEY), &key.serialize_pem()).map_err(cannot_write)?;
    sys::fd::write_whole(&data.join(CA_CERT), made.pem().as_bytes()).map_err(cannot_write)?;
    Ok((key, record))
}

fn authority_params(record: &CertificateRecord, now: SystemTime) -> Result<CertificateParams, Failure> {
    let mut params = CertificateParams::new(Vec::new()).map_err(cannot_make)?;
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + CA_LIFETIME).into();
    params.distinguished_name = subject(&record.authority);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let permitted_subtrees = record.authority_names.iter().filter_map(|name| subtree(name)).collect();
    params.name_constraints = Some(NameConstraints { permitted_subtrees, excluded_subtrees: Vec::new() });
    Ok(params)
}

/// The part of all names that a name of the server allows; that of `*.NAME` is the one of NAME.
fn subtree(name: &str) -> Option<GeneralSubtree> {
    match name.parse::<IpAddr>() {
        Ok(IpAddr::V4(address)) => {
            Some(GeneralSubtree::IpAddress(CidrSubnet::from_v4_prefix(address.octets(), 32)))
        }
        Ok(IpAddr::V6(address)) => {
            Some(GeneralSubtree::IpAddress(CidrSubnet::from_v6_prefix(address.octets(), 128)))
        }
        Err(_) if name.starts_with("*.") => None,
        Err(_) => Some(GeneralSubtree::DnsName(name.to_owned())),
    }
}

fn leaf_params(names: &[String], now: SystemTime) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names.to_vec())?;
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + LIFETIME).into();
    // The last name that is no address and no pattern: the domain.
    let domain = names.iter().rfind(|name| name.parse::<IpAddr>().is_err() && !name.starts_with('*'));
    params.distinguished_name = subject(domain.map_or("localhost", String::as_str));
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn subject(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::OrganizationName, "Palisade");
    // The standard allows 64 characters; the full name is among the alternative names.
    subject.push(DnType::CommonName, name.chars().take(64).collect::<String>());
    subject
}

fn names(config: &ServerConfig) -> Vec<String> {
    let mut names: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).to_vec();
    let domain = config.domain_name();
    if !domain.eq_ignore_ascii_case("localhost") {
        names.push(domain.to_owned());
    }
    // Clients accept no pattern below a name of one part, and some of them no certificate that has one.
    if domain.contains('.') {
        names.push(format!("*.{domain}"));
    }
    let address: IpAddr = config.listen.ip();
    if !address.is_unspecified() && !names.contains(&address.to_string()) {
        names.push(address.to_string());
    }
    names
}

fn unix_s(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn cannot_make(error: rcgen::Error) -> Failure {
    Failure::new(Kind::Host, "cannot create a certificate")
        .because(error)
        .hint("choose a valid domain name: --domain DOMAIN")
}

fn cannot_write(error: io::Error) -> Failure {
    Failure::new(Kind::Host, "cannot write the certificate")
        .because(error)
        .hint("make room on the disk that holds the data directory")
}

fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    io::Write::write_all(&mut file, text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names_of(domain: &str) -> Vec<String> {
        ["localhost", "127.0.0.1", domain].map(str::to_owned).to_vec()
    }

    #[test]
    fn patterns_are_those_that_clients_accept() {
        let names = |domain: &str| {
            let fleet = fleet::FleetConfig { data: "/none".into(), durability: fleet::Durability::Process };
            names(&ServerConfig { domain: domain.into(), ..ServerConfig::new(fleet) })
        };
        assert_eq!(names("localhost"), ["localhost", "127.0.0.1", "::1"]);
        assert_eq!(names("pal.test:443"), ["localhost", "127.0.0.1", "::1", "pal.test", "*.pal.test"]);
        assert_eq!(names("pal"), ["localhost", "127.0.0.1", "::1", "pal"]);
    }

    #[test]
    fn a_certificate_is_renewed_in_time_and_its_authority_stays() {
        let dir = std::env::temp_dir().join(format!("pal-tls-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let read = |file: &str| fs::read_to_string(dir.join(file)).unwrap();
        let now = SystemTime::now();
        let make = |domain: &str, at: SystemTime| {
            make_current(&dir, &names_of(domain), at).unwrap();
            (read(CA_CERT), read(CERT))
        };
        let first = make("pal.test", now);
        assert_eq!(make("pal.test", now + 300 * DAY), first, "enough of its time is left");
        let later = make("pal.test", now + 430 * DAY);
        assert!(later.0 == first.0 && later.1 != first.1, "the authority signs another one");
        let without_domain = make("localhost", now + 430 * DAY);
        assert!(without_domain.0 == first.0 && without_domain.1 != later.1, "it may sign fewer names");
        assert_ne!(make("other.test", now + 430 * DAY).0, first.0, "it may not sign a name of others");
        fs::remove_file(dir.join(KEY)).unwrap();
        make("other.test", now + 430 * DAY);
        assert_eq!(fs::metadata(dir.join(CA_KEY)).unwrap().permissions().mode() & 0o777, 0o600);
        fs::remove_dir_all(dir).unwrap();
    }
}
