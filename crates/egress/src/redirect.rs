//! Connections that the kernel redirects: programs in the Body take them for connections to their targets.
//!
//! Trust: the destination is the kernel's word, but the program chose it. A program can also connect to the listener
//! itself; then the destination is the listener's own address, which is never a target.

use std::{io, net::SocketAddr, os::fd::AsFd, rc::Rc};

use tokio::net::{TcpListener, TcpStream};

use crate::{
    client::{ClientStream, ProxyClient},
    connection::ConnectionOrigin,
    dial::keep_alive,
    proxy::{Proxy, accept_all},
    refusal::{Denial, RefusalForm},
    target::Target,
};

impl Proxy {
    /// Serves redirected connections forever.
    pub async fn serve_redirected(self: Rc<Self>, listener: TcpListener) {
        accept_all(
            &self.free,
            || listener.accept(),
            |(stream, _): (TcpStream, _)| {
                let proxy = Rc::clone(&self);
                async move {
                    keep_alive(&stream);
                    let destination = sys::redirect::original_destination(stream.as_fd());
                    proxy.redirected(stream, destination).await
                }
            },
        )
        .await;
    }

    /// Serves one connection to a destination.
    pub async fn redirected(
        self: &Rc<Self>,
        stream: impl ClientStream,
        destination: io::Result<SocketAddr>,
    ) -> io::Result<()> {
        let mut client = ProxyClient::new(stream);
        let destination = match destination {
            Ok(destination) => destination,
            // The kernel knows no redirection of it.
            Err(_) => {
                let denial = Denial::forbidden("it was made to the proxy itself");
                return self.deny(&mut client, RefusalForm::Reset, "?", denial).await;
            }
        };
        let target = Target::of_address(destination, &self.names.borrow());
        match target {
            Ok(target) => self.connect(client, &target, &ConnectionOrigin::Redirect).await,
            Err(why) => {
                let form = RefusalForm::of_port(destination.port());
                self.deny(&mut client, form, &destination.to_string(), Denial::forbidden(why)).await
            }
        }
    }
}

#[cfg(test)]
#[path = "redirect_tests.rs"]
mod tests;
