//! A port inside the Body as a raw stream: how previews and forwarded ports reach it.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use hyper::{Request, Response, StatusCode, body::Incoming, header, header::HeaderValue};
use hyper_util::rt::TokioIo;
use proto::guest::DIAL_UPGRADE;
use tokio::net::TcpStream;

use crate::{
    query::UrlQuery,
    reply::{HttpReply, PlainRefusal, ReplyBody},
};

const BUFFER_LEN: usize = 16 * 1024;

/// Answers `GET /v1/dial?port=N`: connects to the port and turns the request into a raw stream.
pub async fn answer(query: &UrlQuery, mut request: Request<Incoming>) -> HttpReply {
    let Some(port) = query.text("port").and_then(|port| port.parse().ok()).filter(|port| *port != 0_u16)
    else {
        return PlainRefusal::bad("port is not a number from 1 to 65535").reply();
    };
    let upgrade = request.headers().get(header::UPGRADE).map(HeaderValue::as_bytes);
    if upgrade != Some(DIAL_UPGRADE.as_bytes()) {
        return PlainRefusal::new(
            StatusCode::UPGRADE_REQUIRED,
            format!("dialling needs Upgrade: {DIAL_UPGRADE}"),
        )
        .reply();
    }
    let Some(mut inside) = connect(port).await else {
        let message = format!("The sandbox is running but port {port} does not answer: the port is not open");
        return PlainRefusal::new(StatusCode::BAD_GATEWAY, message).reply();
    };
    let upgraded = hyper::upgrade::on(&mut request);
    tokio::task::spawn_local(async move {
        if let Ok(outside) = upgraded.await {
            let mut outside = TokioIo::new(outside);
            // A stream ends when either side closes it, so there is no error to report.
            let _ =
                tokio::io::copy_bidirectional_with_sizes(&mut outside, &mut inside, BUFFER_LEN, BUFFER_LEN)
                    .await;
        }
    });
    switching()
}

async fn connect(port: u16) -> Option<TcpStream> {
    let stream = match TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await {
        Ok(stream) => stream,
        Err(_) => TcpStream::connect(SocketAddr::from((Ipv6Addr::LOCALHOST, port))).await.ok()?,
    };
    let _ = stream.set_nodelay(true);
    Some(stream)
}

fn switching() -> HttpReply {
    let mut reply = Response::new(ReplyBody::empty());
    *reply.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    reply.headers_mut().insert(header::UPGRADE, HeaderValue::from_static(DIAL_UPGRADE));
    reply
}
