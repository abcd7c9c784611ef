//! Helpers that the targets share.

/// Cuts the input into pieces whose lengths are in its first bytes, as a network might deliver a stream.
pub fn cut(input: &[u8]) -> (&[u8], Vec<&[u8]>) {
    let (count, input) =
        input.split_first().map_or((0, input), |(count, rest)| (usize::from(count % 16), rest));
    let (lengths, stream) = input.split_at(count.min(input.len()));
    let mut pieces = Vec::new();
    let mut rest = stream;
    for length in lengths {
        let (piece, after) = rest.split_at(usize::from(*length).min(rest.len()));
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    (stream, pieces)
}

/// Runs a block with `M` as the message type that a number chooses, among those that a peer may send.
#[macro_export]
macro_rules! with_message {
    ($number:expr, $M:ident => $run:expr) => {{
        use proto::wire::{filesystem as f, process as p};
        macro_rules! run {
            ($T:ty) => {{
                type $M = $T;
                $run
            }};
        }
        match $number {
            0 => run!(p::StartRequest),
            1 => run!(p::StartResponse),
            2 => run!(p::ConnectRequest),
            3 => run!(p::UpdateRequest),
            4 => run!(p::SendInputRequest),
            5 => run!(p::StreamInputRequest),
            6 => run!(p::SendSignalRequest),
            7 => run!(p::CloseStdinRequest),
            8 => run!(p::ListResponse),
            9 => run!(f::ListDirRequest),
            10 => run!(f::ListDirResponse),
            11 => run!(f::WatchDirRequest),
            _ => run!(f::WatchDirResponse),
        }
    }};
}
