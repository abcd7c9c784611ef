//! Connections whose bytes go through unchanged, once the first ones of the program are judged.

use std::{io, rc::Rc, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::{Instant, timeout_at},
};

use crate::{
    budgets::Meter,
    client::{ClientStream, PATIENCE, ProxyClient},
    first_bytes::{FirstBytes, FirstBytesVerdict},
    idle::IdleClock,
    refusal::Denial,
    ssh_agent::{HostOpening, TappedWriter},
    target::Target,
};

/// How long bytes are held that could become a request and most often become none.
const UNCLEAR_PAUSE: Duration = Duration::from_millis(100);
const PIECE_LEN: usize = 4096;

/// Copies both ways until both ends have sent all. With `judged` a target, the first bytes of the program are held until
/// they are known to name no other host; bytes of the host are never held. An opening keeps the host's first ones.
pub async fn splice<S: ClientStream>(
    client: &mut ProxyClient<S>,
    upstream: impl AsyncRead + AsyncWrite,
    judged: Option<&Target>,
    opening: Option<Rc<HostOpening>>,
    meter: &Meter,
) -> io::Result<Result<(), Denial>> {
    let ahead = std::mem::take(&mut client.ahead);
    let (mut from_client, to_client) = tokio::io::split(&mut client.stream);
    let mut to_client = TappedWriter::new(to_client, opening);
    let (mut from_host, mut to_host) = tokio::io::split(upstream);
    let clock = IdleClock::new();
    let up = async {
        match judged {
            None => {
                meter.spend(ahead.len())?;
                to_host.write_all(&ahead).await?;
            }
            Some(target) => {
                if let Err(denial) =
                    judge_first(&ahead, &mut from_client, &mut to_host, (target, meter)).await?
                {
                    return Ok(Err(denial));
                }
            }
        }
        clock.copy(&mut from_client, &mut to_host, meter).await.map(Ok)
    };
    let down = clock.copy(&mut from_host, &mut to_client, meter);
    let (mut up, mut down) = (std::pin::pin!(up), std::pin::pin!(down));
    tokio::select! {
        error = clock.expired() => Err(error),
        done = &mut up => match done? {
            Err(denial) => Ok(Err(denial)),
            Ok(()) => tokio::select! {
                error = clock.expired() => Err(error),
                done = down => done.map(Ok),
            },
        },
        done = &mut down => {
            done?;
            tokio::select! {
                error = clock.expired() => Err(error),
                done = up => done,
            }
        }
    }
}

/// Forwards the first bytes as soon as they may go out.
async fn judge_first(
    ahead: &[u8],
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    (target, meter): (&Target, &Meter),
) -> io::Result<Result<(), Denial>> {
    let mut first = FirstBytes::default();
    let (mut held, mut begun) = (ahead.to_vec(), None);
    let mut verdict = first.push(ahead, target);
    loop {
        let now = Instant::now();
        let until = match verdict {
            FirstBytesVerdict::Pass => {
                meter.spend(held.len())?;
                return to.write_all(&held).await.map(Ok);
            }
            FirstBytesVerdict::Deny(why) => return Ok(Err(Denial::forbidden(why))),
            FirstBytesVerdict::Incomplete => Some(*begun.get_or_insert(now + PATIENCE)),
            FirstBytesVerdict::Unclear if held.is_empty() => None,
            FirstBytesVerdict::Unclear => Some(now + UNCLEAR_PAUSE),
        };
        let mut piece = [0; PIECE_LEN];
        let read = from.read(&mut piece);
        let len = match until {
            None => read.await?,
            Some(until) => match timeout_at(until, read).await {
                Ok(len) => len?,
                Err(_) if verdict == FirstBytesVerdict::Incomplete => {
                    return Ok(Err(Denial::forbidden(
                        "its first bytes are an incomplete TLS hello or HTTP request",
                    )));
                }
                // The program waits for the host. Later bytes are still judged.
                Err(_) => {
                    meter.spend(held.len())?;
                    to.write_all(&std::mem::take(&mut held)).await?;
                    continue;
                }
            },
        };
        if len == 0 {
            // An unfinished hello or request goes nowhere.
            return match verdict {
                FirstBytesVerdict::Incomplete => Err(io::ErrorKind::UnexpectedEof.into()),
                _ => {
                    meter.spend(held.len())?;
                    to.write_all(&held).await.map(Ok)
                }
            };
        }
        held.extend_from_slice(&piece[..len]);
        verdict = first.push(&piece[..len], target);
    }
}
