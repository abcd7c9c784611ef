//! Helpers that the targets share.

use brain::model::{
    Answer, ChatMessage, ModelAddress, ModelError, ModelRequest, Wire,
    codec::{self, AnswerReader},
};

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

/// Reads an answer in two cuts, which must end alike, and sends it back to the endpoint: the request must be JSON.
pub fn read_answer(wire: Wire, input: &[u8]) {
    let (stream, pieces) = cut(input);
    let whole = read_pieces(wire, &[stream]);
    assert_eq!(read_pieces(wire, &pieces), whole);
    if let Ok(answer) = whole {
        let address = ModelAddress::Http { wire, model: "m".to_owned(), base: "http://h".to_owned() };
        let messages = vec![ChatMessage::from_user("hi"), ChatMessage::from_model(answer.blocks)];
        let request = ModelRequest { messages, ..ModelRequest::default() };
        let body = codec::encode(&address, &request).expect("a request");
        // A provider's own numbers and depths go back as text, so that only the grammar counts.
        serde_json::from_str::<&serde_json::value::RawValue>(&body).expect("JSON");
    }
}

fn read_pieces(wire: Wire, pieces: &[&[u8]]) -> Result<Answer, ModelError> {
    let mut reader = AnswerReader::new(wire, "m", &ModelRequest::default());
    for piece in pieces {
        reader.push(piece, &mut |_| {})?;
    }
    reader.finish(&mut |_| {})
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
