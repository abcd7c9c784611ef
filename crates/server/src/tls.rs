//! Encryption: a certificate that is given, or one of our own making.
//!
//! Our own is kept in the data directory as `tls.pem` and `tls.key`, so that whoever trusts it once need not again.
//! It is for `localhost`, `*.localhost`, the domain of ports and everything below it, and the addresses of this machine.

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

/// How a server is encrypted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Tls {
    /// Not at all.
    #[default]
    Off,
    /// With a certificate of our own making.
    SelfMade,
    /// With this certificate chain and its key, in PEM.
    Given {
        /// The chain.
        cert: PathBuf,
        /// Its key.
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

/// What accepts encrypted connections, if the configuration wants that.
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
    // HTTP/2 is not spoken here, so it is not offered.
    built.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Some(Acceptor(TlsAcceptor::from(Arc::new(built)))))
}

/// The certificate to trust, where it is one of our own making.
pub fn certificate(config: &ServerConfig) -> Option<PathBuf> {
    (config.tls == Tls::SelfMade).then(|| config.fleet.data.join(CERT))
}

fn unusable(what: &str, path: &Path, error: impl std::error::Error + Send + Sync + 'static) -> Failure {
    Failure::new(Kind::Usage, format!("the {what} in {} cannot be used", path.display()))
        .because(error)
        .hint("give both in PEM: pal serve --tls --cert FILE --key FILE")
}

/// Ours, as it was made for the same names before, or made now.
fn self_made(config: &ServerConfig, data: &Path) -> Result<(PathBuf, PathBuf), Failure> {
    let (cert, key, names_file) = (data.join(CERT), data.join(KEY), data.join("tls.names"));
    let names = names(config);
    let said = names.join("\n");
    if cert.exists() && key.exists() && fs::read_to_string(&names_file).is_ok_and(|before| before == said) {
        return Ok((cert, key));
    }
    let made = rcgen::generate_simple_self_signed(names).map_err(|error| {
        Failure::new(Kind::Host, "cannot make a certificate")
            .because(error)
            .hint("choose a domain that can be a name: --domain DOMAIN")
    })?;
    let cannot = |error: io::Error| {
        Failure::new(Kind::Host, "cannot write the certificate")
            .because(error)
            .hint("make room on the disk that holds the data directory")
    };
    write_private(&key, &made.signing_key.serialize_pem()).map_err(cannot)?;
    sys::fd::write_whole(&cert, made.cert.pem().as_bytes()).map_err(cannot)?;
    // Last: without it both are made again.
    sys::fd::write_whole(&names_file, said.as_bytes()).map_err(cannot)?;
    Ok((cert, key))
}

fn names(config: &ServerConfig) -> Vec<String> {
    let mut names: Vec<String> = ["localhost", "*.localhost", "127.0.0.1", "::1"].map(str::to_owned).to_vec();
    if config.domain != "localhost" {
        // A domain may be given with a port, which is no part of a name.
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
