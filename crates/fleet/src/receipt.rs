//! Receipts: after a resume or a restore, the guest proves its identity, its clock and its files.
//!
//! Trust: a receipt comes from inside the sandbox. It is size-limited and checked before it is recorded.

use body::BodyDir;
use proto::{Failure, Kind, event_data::BodyReceipt};

use crate::{Fleet, vm::incomplete};

/// Requests the receipt from the guest of a resumed Body, checks it and records it.
pub(crate) async fn request_receipt(
    fleet: &Fleet,
    dir: &BodyDir,
    id: &proto::BodyId,
    how: &str,
) -> Result<(), Failure> {
    let began = std::time::Instant::now();
    let sent = now_ns();
    let receipt = fleet
        .guest(id)
        .receipt(sent)
        .await
        .map_err(|error| incomplete(&format!("its guest does not answer: {error}")))?
        .bounded();
    if !receipt.tree.is_sound() {
        return Err(incomplete("its guest reports no state of its files"));
    }
    let offset = proto::vm::clock_offset_ms(&receipt, sent, now_ns());
    if receipt.body != *id {
        return Err(incomplete("its guest reports the identity of another Body"));
    }
    if offset.abs() > proto::vm::CLOCK_OFFSET_MAX_MS {
        return Err(incomplete(&format!("its clock is {offset} ms off")));
    }
    let revival = proto::vm::StartReport {
        board: dir.revival().map_or(0, |before| before.board),
        how: how.to_owned(),
        clock_offset_ms: offset,
        took_ms: began.elapsed().as_millis() as u64,
        receipt,
    };
    fleet.write(id, BodyReceipt { revival: revival.clone() })?;
    dir.write_receipt(&revival).map_err(|error| {
        Failure::new(Kind::Host, "cannot store the receipt of the Body")
            .because(error)
            .hint("make room: pal gc")
    })
}

fn now_ns() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as u64)
}
