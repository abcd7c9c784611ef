//! A scripted model server: `model_server SCRIPT [CHUNK_BYTES]`. It prints its URL and serves until it is killed.

use std::{error::Error, path::Path};

use brain::model::{
    ApiKey,
    scripted::{ModelServer, Script, ServerOptions},
};

#[tokio::main(flavor = "current_thread")]
#[expect(clippy::print_stdout, reason = "a program says where it listens")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let script = arguments.next().ok_or("usage: model_server SCRIPT [CHUNK_BYTES]")?;
    let chunk_bytes = arguments.next().map(|text| text.parse()).transpose()?;
    let key = std::env::var("MODEL_KEY").ok().map(ApiKey::new);
    let script = Script::open(Path::new(&script))?;
    let options = ServerOptions { chunk_bytes, key };
    let server = ModelServer::bind(script, "127.0.0.1:0".parse()?, options).await?;
    println!("http://{}", server.address());
    server.run().await?;
    Ok(())
}
