//! One question to a model: `model_ask ADDRESS [ATTEMPTS]` reads a request as JSON and prints the answer, or
//! `{"error": KIND}`. The vendors' SDKs are compared with it in `tests/models`.

use std::{error::Error, io, time::Duration};

use brain::model::{ApiKey, HttpOptions, ModelRequest, RetryPolicy, open};

#[tokio::main(flavor = "current_thread")]
#[expect(clippy::print_stdout, reason = "a program prints its result")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().ok_or("usage: model_ask ADDRESS [ATTEMPTS]")?.parse()?;
    let attempts_max = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let key = std::env::var("MODEL_KEY").ok().map(ApiKey::new);
    let request: ModelRequest = serde_json::from_reader(io::stdin().lock())?;
    let retry = RetryPolicy { attempts_max, wait_first: Duration::from_millis(1), ..RetryPolicy::default() };
    let model = open(&address, key, HttpOptions { retry, ..HttpOptions::default() })?;
    match model.answer(&request, &|_| {}).await {
        Ok(answer) => println!("{}", serde_json::to_string(&answer)?),
        Err(error) => {
            println!("{}", serde_json::json!({ "error": error.kind(), "message": error.to_string() }))
        }
    }
    Ok(())
}
