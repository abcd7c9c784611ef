//! `pal port forward`: connects ports of this machine to ports inside a Body.
//!
//! Invariant: it listens on the loopback of this machine alone, and only as long as it runs.

use std::{io, net::Ipv4Addr, rc::Rc};

use fleet::Fleet;
use proto::{BodyId, Failure, Kind};
use serde_json::json;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::LocalSet,
};

use crate::{
    args::{PortCommand, PortForwardArgs, PortPair},
    output::{self, Format},
};

/// Runs a command about ports.
pub async fn port(fleet: Fleet, command: PortCommand, format: Format) -> Result<(), Failure> {
    match command {
        PortCommand::Forward(args) => LocalSet::new().run_until(forward(Rc::new(fleet), &args, format)).await,
    }
}

async fn forward(fleet: Rc<Fleet>, args: &PortForwardArgs, format: Format) -> Result<(), Failure> {
    let view = fleet.find(&args.body)?;
    let id = view.id().clone();
    // A Body that does not run is an error now, and not at the first connection.
    fleet.access().processes(&id).await?;
    let mut tasks = Vec::new();
    for pair in &args.ports {
        let listener = listen(pair).await?;
        let local = listener.local_addr().map_err(|error| cannot_listen(pair.local, &error))?;
        match format {
            Format::Json => {
                output::json(&json!({ "id": id, "port": pair.inside, "local": local.to_string() }))?
            }
            Format::Text => {
                output::data(format!("http://{local} -> port {} of Body {id}\n", pair.inside).as_bytes())?
            }
        }
        tasks.push(tokio::task::spawn_local(serve(Rc::clone(&fleet), id.clone(), listener, pair.inside)));
    }
    output::talk("forwarding until you press Ctrl-C");
    let _ = tokio::signal::ctrl_c().await;
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    Ok(())
}

async fn listen(pair: &PortPair) -> Result<TcpListener, Failure> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, pair.local))
        .await
        .map_err(|error| cannot_listen(pair.local, &error))
}

fn cannot_listen(port: u16, error: &io::Error) -> Failure {
    Failure::new(Kind::Host, format!("cannot listen on port {port} of this machine: {error}"))
        .hint("choose another one: pal port forward BODY PORT:LOCAL; LOCAL 0 takes any that is free")
}

/// Serves connections until the task is aborted.
async fn serve(fleet: Rc<Fleet>, id: BodyId, listener: TcpListener, inside: u16) {
    loop {
        // Most often the process has too many open files for a moment.
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            continue;
        };
        tokio::task::spawn_local(connect(Rc::clone(&fleet), id.clone(), stream, inside));
    }
}

async fn connect(fleet: Rc<Fleet>, id: BodyId, mut stream: TcpStream, inside: u16) {
    match fleet.access().dial(&id, inside).await {
        Ok(mut far) => {
            let _ = stream.set_nodelay(true);
            let _ = copy_bidirectional(&mut stream, &mut far).await;
        }
        Err(failure) => {
            output::talk(&format!("port {inside} of Body {id}: {failure}"));
            // A reset: a program would take an orderly end for an empty answer.
            let _ = stream.set_zero_linger();
        }
    }
}
