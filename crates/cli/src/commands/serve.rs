//! `pal serve`.

use std::{sync::Arc, time::Duration};

use proto::{Failure, Kind};
use serde_json::json;
use server::{Exposure, InternetAccess, Server, ServerBounds, Telemetry, Tls};
use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
};
use tracing::Level;
use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, Targets},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

use crate::{
    args::ServeArgs,
    output::{self, Format},
    settings::variable,
};

/// The standard variable with the address of an OpenTelemetry collector.
const COLLECTOR: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// The configuration directory of a server that runs without a home directory.
const CONFIG_OF_SERVICE: &str = "/etc/palisade";
/// How long background tasks may take to end.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// Serves until SIGTERM or SIGINT.
pub fn serve(args: &ServeArgs, fleet: fleet::FleetConfig, format: Format) -> Result<u8, Failure> {
    let exposure = if args.insecure { Exposure::Open } else { Exposure::Guarded };
    let tls = match (args.tls, &args.cert, &args.key) {
        (false, ..) => Tls::Off,
        (true, Some(cert), Some(key)) => Tls::Given { cert: cert.clone(), key: key.clone() },
        (true, ..) => Tls::SelfMade,
    };
    let bounds = ServerBounds {
        bodies_max: args.max_bodies as usize,
        memory_reserve: args.reserve,
        peer_connections_max: args.max_peer_connections as usize,
        ..ServerBounds::default()
    };
    let config = server::ServerConfig {
        listen: args.listen,
        exposure,
        domain: args.domain.clone(),
        bounds,
        tls,
        internet: match args.internet.as_str() {
            "allow" => InternetAccess::Allowed,
            "ask" => InternetAccess::Asked,
            _ => InternetAccess::Denied,
        },
        body_env: crate::settings::body_env(),
        host_variables: |name| std::env::var_os(name),
        git_identity: super::work::git_identity(),
        images_of_repositories: super::templates::images::image_of_repository,
        agents: agent_config(),
        ..server::ServerConfig::new(fleet)
    };
    let config =
        server::ServerConfig { registries: registries(&args.registries, config.registries), ..config };
    let config = server::ServerConfig {
        build_allow: crate::settings::allowed_hosts(args.build_offline, &args.build_allow)?,
        ..config
    };
    let runtime = Builder::new_multi_thread().enable_all().thread_name("pal-serve").build();
    let runtime = runtime.map_err(|error| Failure::new(Kind::Host, "cannot start threads").because(error))?;
    let collector = args.otlp.clone().map_or_else(|| variable(COLLECTOR), |url| Ok(Some(url)))?;
    let telemetry = collector.map(|url| Telemetry::start(&url, runtime.handle())).transpose()?;
    tell_log(&args.log, telemetry.as_ref());
    let config = server::ServerConfig { telemetry: telemetry.clone(), ..config };
    let served = runtime.block_on(async {
        let stop = asked_to_stop()?;
        let server = Server::start(config).await?;
        tell(&server, format)?;
        server.run(stop).await;
        Ok(0)
    });
    if let Some(telemetry) = telemetry {
        telemetry.finish();
    }
    // Dropping all references to the fleet removes the pooled Body that waits for the next request.
    runtime.shutdown_timeout(LAST_WAIT);
    served
}

/// The settings of agents. A service without a home has its configuration in `/etc`.
fn agent_config() -> server::AgentConfig {
    server::AgentConfig {
        directory: super::agent::config_dir().unwrap_or_else(|_| CONFIG_OF_SERVICE.into()),
        variables: Arc::new(|name| std::env::var(name).ok().filter(|value| !value.is_empty())),
    }
}

/// The registries that builds may use besides public ones.
fn registries(said: &[String], reach: fleet::RegistryAccess) -> fleet::RegistryAccess {
    let bare = |said: &String| {
        said.trim_start_matches("http://").trim_start_matches("https://").trim_end_matches('/').to_owned()
    };
    let plain = said.iter().filter(|said| said.starts_with("http://")).map(bare).collect();
    fleet::RegistryAccess { trusted: said.iter().map(bare).collect(), plain, ..reach }
}

/// Logs to standard error; spans also go to a collector.
fn tell_log(level: &str, telemetry: Option<&Telemetry>) {
    let level = level.parse().unwrap_or(LevelFilter::WARN);
    let log =
        tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).with_filter(level);
    let spans = telemetry
        .map(|telemetry| telemetry.layer().with_filter(Targets::new().with_target("server", Level::INFO)));
    tracing_subscriber::registry().with(spans).with(log).init();
}

/// Resolves at SIGTERM or SIGINT. The handlers are installed by this call, so signals count while the server
/// starts, too.
fn asked_to_stop() -> Result<impl Future<Output = ()>, Failure> {
    let listen =
        |kind| signal(kind).map_err(|error| Failure::new(Kind::Host, "cannot handle signals").because(error));
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

fn tell(server: &Server, format: Format) -> Result<(), Failure> {
    let config = server.app().config();
    let scheme = if config.tls == Tls::Off { "http" } else { "https" };
    let url = format!("{scheme}://{}", server.address());
    let certificate = server::certificate(config);
    let key = server.first_key().map(|key| key.secret.as_str());
    let key_file = config.fleet.data.join(server::keys::FIRST);
    if format == Format::Json {
        return output::json(&json!({
            "url": url, "secret": key, "secret_file": key_file, "certificate": certificate, "pid": std::process::id(),
        }));
    }
    output::line(format_args!("serving at {url}"))?;
    // No certificate is valid for all names below a name of one part, such as `localhost`.
    let mut variables = if config.tls != Tls::Off && config.domain_name().contains('.') {
        format!("E2B_DOMAIN={}", server.app().public_domain())
    } else {
        format!("E2B_API_URL={url} E2B_SANDBOX_URL={url}")
    };
    if let Some(certificate) = &certificate {
        let certificate = certificate.display();
        output::talk(&format!("clients must trust the authority of its certificate: {certificate}"));
        variables.push_str(&format!(" SSL_CERT_FILE={certificate} NODE_EXTRA_CA_CERTS={certificate}"));
    }
    let shown = key.unwrap_or("e2b_…");
    output::talk(&format!(
        "programs written for E2B run unchanged with\n  export {variables} E2B_API_KEY={shown}"
    ));
    let told = if key.is_some() {
        "this key is new and is not printed again"
    } else {
        "the first start printed the key"
    };
    output::talk(&format!("{told}; {} has it, too", key_file.display()));
    Ok(())
}
