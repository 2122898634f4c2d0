//! An unmodified v1 consumer: prints and acknowledges each batch, with its own collector running.
//!
//! Usage: v1_consumer BUCKET MANIFEST_PATH DATA_PATH_PREFIX GRACE_MS ACK_EVERY
//!
//! Each line has a sequence, the location of the batch, and its records, separated by commas. A line
//! `acked N` follows an acknowledgement. It ends with code 3 when another consumer took over.

use std::io::Write;
use std::time::Duration;

use buffer::{Consumer, ConsumerConfig, Error};
use common::ObjectStoreConfig;
use common::storage::config::AwsObjectStoreConfig;

fn say(line: String) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).unwrap();
}

fn end(error: Error) -> ! {
    if matches!(error, Error::Fenced) {
        say("fenced".to_string());
        std::process::exit(3);
    }
    say(format!("error {error}"));
    std::process::exit(4);
}

#[tokio::main]
async fn main() {
    let args: Vec<String> = std::env::args().collect();
    let grace = Duration::from_millis(args[4].parse().unwrap());
    let ack_every: u64 = args[5].parse().unwrap();
    let config = ConsumerConfig {
        object_store: ObjectStoreConfig::Aws(AwsObjectStoreConfig {
            region: "us-east-1".to_string(),
            bucket: args[1].clone(),
        }),
        manifest_path: args[2].clone(),
        data_path_prefix: args[3].clone(),
        gc_interval: Duration::from_millis(500),
        gc_grace_period: grace,
    };
    let mut consumer = match Consumer::new(config, None).await {
        Ok(consumer) => consumer,
        Err(error) => end(error),
    };
    say("claimed".to_string());
    let mut count = 0;
    let mut unacked = None;
    loop {
        match consumer.next_batch().await {
            Err(error) => end(error),
            Ok(Some(batch)) => {
                let records: Vec<_> = batch
                    .entries
                    .iter()
                    .map(|entry| String::from_utf8_lossy(entry).to_string())
                    .collect();
                say(format!("{} {} {}", batch.sequence, batch.location, records.join(",")));
                count += 1;
                unacked = Some(batch.sequence);
                if count % ack_every != 0 {
                    continue;
                }
            }
            Ok(None) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
        if let Some(sequence) = unacked.take() {
            match consumer.ack_through(sequence).await {
                Ok(()) => say(format!("acked {sequence}")),
                Err(error) => end(error),
            }
        }
    }
}
