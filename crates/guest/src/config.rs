//! The guest's start options: its configuration and where it listens.
//!
//! In a Body both come from the launcher, so nothing in the Body can read or reach them. `--config FILE` with
//! `--unix PATH` or `--tcp ADDR` is for tests and developers.

use std::{
    fs::File,
    io::{self, Read},
    net::{SocketAddr, UdpSocket},
    os::unix::{ffi::OsStringExt, net::UnixListener},
    path::PathBuf,
    sync::Arc,
};

use proto::guest::GuestConfig;

const CONFIG_LEN_MAX: u64 = 4 << 20;
const USAGE: &str = "usage: pal-guest --config FILE (--unix PATH | --tcp ADDRESS:PORT)";

/// The reason why the guest cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The command line is not one of the two known forms.
    #[error("{USAGE}")]
    Usage,
    /// The configuration file cannot be read.
    #[error("cannot read the configuration: {0}")]
    Read(#[source] io::Error),
    /// The configuration file is not valid.
    #[error("the configuration is invalid: {0}")]
    Parse(#[source] serde_json::Error),
    /// The socket cannot be bound.
    #[error("cannot listen: {0}")]
    Listen(#[source] io::Error),
    /// The runtime cannot be created or fails.
    #[error("cannot run: {0}")]
    Runtime(#[source] io::Error),
}

/// The endpoint at which callers connect.
#[derive(Debug)]
pub enum Listener {
    /// The Unix socket in the Body's directory: the host's only way into the Body.
    Unix(UnixListener),
    /// A TCP address, for developers.
    Tcp(std::net::TcpListener),
    /// The channel of a microVM.
    Machine(std::rc::Rc<crate::vm::GuestMachine>),
}

/// All start options of the guest.
#[derive(Debug)]
pub struct GuestOptions {
    /// The configuration.
    pub config: Arc<GuestConfig>,
    /// The endpoint at which it listens.
    pub listener: Listener,
    /// The socket on which programs of the Body ask for names.
    pub resolver: Option<UdpSocket>,
    /// Overlays of which it reports changed files to git's fsmonitor.
    pub followed: Vec<crate::fsmonitor::FollowedOverlay>,
}

/// Reads the options from the command line.
pub fn read() -> Result<GuestOptions, ConfigError> {
    let args: Vec<Vec<u8>> = std::env::args_os().skip(1).map(OsStringExt::into_vec).collect();
    let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
    match args[..] {
        [b"--config", file, b"--unix", path] => Ok(GuestOptions {
            config: parse(File::open(path_of(file)).map_err(ConfigError::Read)?)?.into(),
            listener: unix(UnixListener::bind(path_of(path)).map_err(ConfigError::Listen)?)?,
            resolver: None,
            followed: Vec::new(),
        }),
        [b"--config", file, b"--tcp", address] => Ok(GuestOptions {
            config: parse(File::open(path_of(file)).map_err(ConfigError::Read)?)?.into(),
            listener: tcp(&String::from_utf8_lossy(address)).map_err(ConfigError::Listen)?,
            resolver: None,
            followed: Vec::new(),
        }),
        _ => Err(ConfigError::Usage),
    }
}

fn parse(file: File) -> Result<GuestConfig, ConfigError> {
    let mut text = Vec::new();
    file.take(CONFIG_LEN_MAX).read_to_end(&mut text).map_err(ConfigError::Read)?;
    serde_json::from_slice(&text).map_err(ConfigError::Parse)
}

/// Makes a listener non-blocking, as the runtime needs it.
pub fn unix(listener: UnixListener) -> Result<Listener, ConfigError> {
    listener.set_nonblocking(true).map_err(ConfigError::Listen)?;
    Ok(Listener::Unix(listener))
}

fn tcp(address: &str) -> io::Result<Listener> {
    // The address is parsed, not resolved: a resolver would pull half a C library into the guest.
    let address: SocketAddr = address.parse().map_err(io::Error::other)?;
    let listener = std::net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(Listener::Tcp(listener))
}

fn path_of(bytes: &[u8]) -> PathBuf {
    PathBuf::from(std::ffi::OsString::from_vec(bytes.to_vec()))
}
