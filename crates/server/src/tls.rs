//! TLS: with a given certificate, or with a self-signed one.
//!
//! The server stores the self-signed certificate in the data directory as `tls.pem` and `tls.key`, so that
//! clients need to trust it only once. It is valid for `localhost`, `*.localhost`, the domain of ports and
//! its subdomains, and the addresses of this host.

use std::{
    fs, io,
    net::IpAddr,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use proto::{Failure, Kind};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio_rustls::TlsAcceptor;

use crate::ServerConfig;

/// The encryption of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Tls {
    /// No encryption.
    #[default]
    Off,
    /// TLS with a self-signed certificate.
    SelfMade,
    /// TLS with this certificate chain and key, in PEM.
    Given {
        /// The certificate chain.
        cert: PathBuf,
        /// Its private key.
        key: PathBuf,
    },
}

const CERT: &str = "tls.pem";
const KEY: &str = "tls.key";

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
        Tls::SelfMade => self_made(config, data)?,
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
    // The server does not support HTTP/2, so it does not offer it.
    built.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Some(Acceptor(TlsAcceptor::from(Arc::new(built)))))
}

/// The self-signed certificate that clients must trust, if the server uses one.
pub fn certificate(config: &ServerConfig) -> Option<PathBuf> {
    (config.tls == Tls::SelfMade).then(|| config.fleet.data.join(CERT))
}

fn unusable(what: &str, path: &Path, error: impl std::error::Error + Send + Sync + 'static) -> Failure {
    Failure::new(Kind::Usage, format!("the {what} in {} cannot be used", path.display()))
        .because(error)
        .hint("give both in PEM: pal serve --tls --cert FILE --key FILE")
}

/// The self-signed certificate: the existing one if it has the same names, or a new one.
fn self_made(config: &ServerConfig, data: &Path) -> Result<(PathBuf, PathBuf), Failure> {
    let (cert, key, names_file) = (data.join(CERT), data.join(KEY), data.join("tls.names"));
    let names = names(config);
    let said = names.join("\n");
    if cert.exists() && key.exists() && fs::read_to_string(&names_file).is_ok_and(|before| before == said) {
        return Ok((cert, key));
    }
    let made = rcgen::generate_simple_self_signed(names).map_err(|error| {
        Failure::new(Kind::Host, "cannot create a certificate")
            .because(error)
            .hint("choose a valid domain name: --domain DOMAIN")
    })?;
    let cannot = |error: io::Error| {
        Failure::new(Kind::Host, "cannot write the certificate")
            .because(error)
            .hint("make room on the disk that holds the data directory")
    };
    write_private(&key, &made.signing_key.serialize_pem()).map_err(cannot)?;
    sys::fd::write_whole(&cert, made.cert.pem().as_bytes()).map_err(cannot)?;
    // Written last: without this file, the next start creates both again.
    sys::fd::write_whole(&names_file, said.as_bytes()).map_err(cannot)?;
    Ok((cert, key))
}

fn names(config: &ServerConfig) -> Vec<String> {
    let mut names: Vec<String> = ["localhost", "*.localhost", "127.0.0.1", "::1"].map(str::to_owned).to_vec();
    if config.domain != "localhost" {
        // The domain may have a port, which is not part of the name.
        let domain = config.domain.split(':').next().unwrap_or_default();
        names.extend([domain.to_owned(), format!("*.{domain}")]);
    }
    let address: IpAddr = config.listen.ip();
    if !address.is_unspecified() && !names.contains(&address.to_string()) {
        names.push(address.to_string());
    }
    names
}

fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    io::Write::write_all(&mut file, text.as_bytes())
}
