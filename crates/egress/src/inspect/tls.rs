//! The two ends of inspected TLS: certificates for the program, and trust in the host's.
//!
//! Invariant: a host's certificate is checked as the host of the Body checks it, for the name that was judged.
//! Invariant: a certificate for a name is signed only after the policy asked to inspect the name.

use std::{
    cell::{OnceCell, RefCell},
    collections::HashMap,
    fs::File,
    io::{self, Read, Seek},
    sync::Arc,
    time::SystemTime,
};

use proto::egress::AuthorityOrder;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject},
    sign::{CertifiedKey, SingleCertAndKey},
};
use vault::{LeafIssuer, SealKey};

/// Names whose certificates are kept.
const LEAVES_MAX: usize = 256;
const BUNDLE_LEN_MAX: u64 = 8 << 20;

/// The certificates of inspected names, and the authorities that this host trusts.
pub struct Certificates {
    provider: Arc<CryptoProvider>,
    signer: RefCell<Option<Signer>>,
    /// The certificates that this host trusts, read when the first name is inspected.
    bundle: Option<File>,
    roots: OnceCell<Arc<RootCertStore>>,
}

struct Signer {
    order: AuthorityOrder,
    issuer: LeafIssuer,
    chain: Vec<CertificateDer<'static>>,
    leaves: HashMap<String, (Arc<CertifiedKey>, SystemTime)>,
}

impl Certificates {
    /// Inspects nothing until it has an authority.
    pub fn new(bundle: Option<File>) -> Self {
        Self {
            provider: Arc::new(ring::default_provider()),
            signer: RefCell::default(),
            bundle,
            roots: OnceCell::new(),
        }
    }

    /// Uses the authority of orders from now on.
    pub fn set_authority(&self, order: Option<&AuthorityOrder>, key: Option<&SealKey>) -> Result<(), String> {
        let mut signer = self.signer.borrow_mut();
        let Some(order) = order else {
            *signer = None;
            return Ok(());
        };
        if signer.as_ref().is_none_or(|signer| signer.order != *order) {
            let key = key.ok_or("there is no key for the authority of the Body")?;
            *signer = Some(Signer::open(order, key)?);
        }
        Ok(())
    }

    /// The configuration for a program that connects to a name.
    pub fn server(&self, name: &str, protocol: Option<&[u8]>) -> Result<Arc<ServerConfig>, String> {
        let mut signer = self.signer.borrow_mut();
        let signer = signer.as_mut().ok_or("the Body has no authority for certificates")?;
        let certified = signer.certified(name, &self.provider)?;
        let config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let resolver = SingleCertAndKey::from(certified);
        let mut config = config.with_no_client_auth().with_cert_resolver(Arc::new(resolver));
        config.alpn_protocols = protocol.map(<[u8]>::to_vec).into_iter().collect();
        Ok(Arc::new(config))
    }

    /// The configuration for a host.
    pub fn client(&self, protocols: Vec<Vec<u8>>) -> Result<Arc<ClientConfig>, String> {
        let roots = match self.roots.get() {
            Some(roots) => Arc::clone(roots),
            None => {
                let read = read_roots(self.bundle.as_ref()).map_err(|error| {
                    format!("the certificates that this host trusts cannot be read: {error}")
                })?;
                Arc::clone(self.roots.get_or_init(|| Arc::new(read)))
            }
        };
        let config = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = protocols;
        Ok(Arc::new(config))
    }
}

impl Signer {
    fn open(order: &AuthorityOrder, key: &SealKey) -> Result<Self, String> {
        let opened = key.open(&format!("authority {}", order.id), &order.sealed_key);
        let opened =
            opened.map_err(|error| format!("the key of the Body's authority cannot be used: {error}"))?;
        let issuer = LeafIssuer::new(&order.id, &opened).map_err(|error| error.to_string())?;
        let chain =
            CertificateDer::pem_slice_iter(order.certificate.as_bytes()).collect::<Result<Vec<_>, _>>();
        let chain = chain
            .map_err(|error| format!("the certificate of the Body's authority is malformed: {error}"))?;
        Ok(Self { order: order.clone(), issuer, chain, leaves: HashMap::new() })
    }

    fn certified(&mut self, name: &str, provider: &CryptoProvider) -> Result<Arc<CertifiedKey>, String> {
        let now = SystemTime::now();
        if let Some((certified, _)) = self.leaves.get(name).filter(|(_, renew_at)| *renew_at > now) {
            return Ok(Arc::clone(certified));
        }
        let leaf = self.issuer.sign(name).map_err(|error| error.to_string())?;
        let mut chain = vec![CertificateDer::from(leaf.certificate)];
        chain.extend(self.chain.iter().cloned());
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(leaf.key.to_vec()));
        let certified = CertifiedKey::from_der(chain, key, provider).map_err(|error| error.to_string())?;
        let certified = Arc::new(certified);
        if self.leaves.len() >= LEAVES_MAX {
            self.leaves.clear();
        }
        self.leaves.insert(name.to_owned(), (Arc::clone(&certified), leaf.renew_at));
        Ok(certified)
    }
}

fn read_roots(bundle: Option<&File>) -> io::Result<RootCertStore> {
    let mut file = bundle.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "there are none"))?;
    let mut text = Vec::new();
    file.rewind()?;
    file.take(BUNDLE_LEN_MAX).read_to_end(&mut text)?;
    let mut roots = RootCertStore::empty();
    // Bundles have certificates that rustls does not read; without them the others still count.
    roots.add_parsable_certificates(CertificateDer::pem_slice_iter(&text).flatten());
    match roots.is_empty() {
        true => Err(io::Error::new(io::ErrorKind::InvalidData, "there are none")),
        false => Ok(roots),
    }
}
