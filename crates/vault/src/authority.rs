//! The certificates that a Body's programs are shown for inspected names.
//!
//! Each Body has a root authority, which its programs trust, and whose key only `pal` opens. For each policy the root
//! signs an authority that is limited to the policy's inspected names; the egress process holds that one and signs
//! certificates of servers with it.
//!
//! Invariant: no authority is trusted outside its Body, and the one that the egress process holds signs for no other name
//! than the policy inspects.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, GeneralSubtree,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, NameConstraints, date_time_ymd,
};
use zeroize::Zeroizing;

const DAY: Duration = Duration::from_secs(24 * 3600);
/// How long an authority counts: longer than its Body lives.
const AUTHORITY_DAYS: u32 = 20 * 365;
/// How long the certificate of a server counts.
const LEAF_DAYS: u32 = 7;

/// A certificate or a key that cannot be made or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct AuthorityError(String);

impl From<rcgen::Error> for AuthorityError {
    fn from(error: rcgen::Error) -> Self {
        Self(error.to_string())
    }
}

/// The root authority of a Body.
pub struct RootAuthority {
    id: String,
    key: KeyPair,
}

/// An authority that signs certificates of servers.
#[derive(Debug)]
pub struct SigningAuthority {
    /// Its certificate, in PEM.
    pub certificate: String,
    /// Its key, in DER.
    pub key: Zeroizing<Vec<u8>>,
}

/// Signs certificates of servers.
pub struct LeafIssuer {
    issuer: Issuer<'static, KeyPair>,
    /// All servers of a process have one key.
    key: KeyPair,
}

/// The certificate of a server.
#[derive(Debug, Clone)]
pub struct LeafCertificate {
    /// The certificate, in DER.
    pub certificate: Vec<u8>,
    /// Its key, in DER.
    pub key: Zeroizing<Vec<u8>>,
    /// From this time on it should be made again.
    pub renew_at: SystemTime,
}

impl RootAuthority {
    /// A new authority. The id tells the authorities of Bodies apart.
    pub fn generate(id: &str) -> Result<Self, AuthorityError> {
        Ok(Self { id: id.to_owned(), key: KeyPair::generate()? })
    }

    /// An authority with this key.
    pub fn with_key(id: &str, key: &[u8]) -> Result<Self, AuthorityError> {
        Ok(Self { id: id.to_owned(), key: key_pair(key)? })
    }

    /// Its key, in DER.
    pub fn key(&self) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(self.key.serialize_der())
    }

    /// Its certificate, in PEM. Each call makes another one with the same name and key; programs take any of them.
    pub fn certificate(&self) -> Result<String, AuthorityError> {
        Ok(self.params().self_signed(&self.key)?.pem())
    }

    fn params(&self) -> CertificateParams {
        authority_params(format!("Palisade Body {} root", self.id), BasicConstraints::Constrained(1))
    }

    /// Signs an authority for names and those below them; for all names without a list.
    pub fn sign_authority(&self, names: Option<&[String]>) -> Result<SigningAuthority, AuthorityError> {
        let mut params = signing_params(&self.id);
        params.name_constraints = names.map(|names| NameConstraints {
            permitted_subtrees: names.iter().cloned().map(GeneralSubtree::DnsName).collect(),
            excluded_subtrees: Vec::new(),
        });
        let key = KeyPair::generate()?;
        let root = self.params();
        let certificate = params.signed_by(&key, &Issuer::from_params(&root, &self.key))?.pem();
        Ok(SigningAuthority { certificate, key: Zeroizing::new(key.serialize_der()) })
    }
}

impl LeafIssuer {
    /// The issuer of an authority with this id and key.
    pub fn new(id: &str, key: &[u8]) -> Result<Self, AuthorityError> {
        Ok(Self { issuer: Issuer::new(signing_params(id), key_pair(key)?), key: KeyPair::generate()? })
    }

    /// A certificate for a name.
    pub fn sign(&self, name: &str) -> Result<LeafCertificate, AuthorityError> {
        let mut params = CertificateParams::new([name.to_owned()])?;
        params.distinguished_name =
            common_name(if name.len() <= 64 { name } else { "a long name" }.to_owned());
        set_validity(&mut params, LEAF_DAYS);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&self.key, &self.issuer)?.der().to_vec();
        let key = Zeroizing::new(self.key.serialize_der());
        Ok(LeafCertificate { certificate, key, renew_at: SystemTime::now() + (LEAF_DAYS - 1) * DAY })
    }
}

fn key_pair(key: &[u8]) -> Result<KeyPair, AuthorityError> {
    Ok(KeyPair::try_from(key)?)
}

fn common_name(name: String) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn signing_params(id: &str) -> CertificateParams {
    authority_params(format!("Palisade Body {id}"), BasicConstraints::Constrained(0))
}

fn authority_params(name: String, constraints: BasicConstraints) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = common_name(name);
    params.is_ca = IsCa::Ca(constraints);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = true;
    set_validity(&mut params, AUTHORITY_DAYS);
    params
}

/// Lets a certificate count from two days ago, because clocks of guests may be behind, for some days from now.
fn set_validity(params: &mut CertificateParams, days: u32) {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let now = date_time_ymd(1970, 1, 1) + since;
    (params.not_before, params.not_after) = (now - 2 * DAY, now + days * DAY);
}
