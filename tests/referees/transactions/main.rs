//! Judges transactions over partitions as list-append, by the crate adya.
//!
//! `transactions MODELS ANOMALIES HISTORY ...` prints one line of JSON for each history. MODELS and
//! ANOMALIES are adya's names with commas between them, of which either may be empty.

use adya::{check, History, Opts, Workload};
use serde_json::json;

fn names(list: &str) -> Vec<String> {
    list.split(',').filter(|each| !each.is_empty()).map(String::from).collect()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [models, anomalies, paths @ ..] = arguments.as_slice() else {
        panic!("usage: transactions MODELS ANOMALIES HISTORY ...");
    };
    let wanted =
        Opts { models: names(models), anomalies: names(anomalies), ..Opts::default() };
    for path in paths {
        let text = std::fs::read_to_string(path).expect("the history can be read");
        let history = History::from_json(&text).expect("the history is one");
        let report = check(&history, Workload::ListAppend, &wanted);
        let why: Vec<&str> = report
            .anomalies
            .values()
            .flatten()
            .map(|each| each.explanation.lines().next_back().unwrap_or(""))
            .take(3)
            .collect();
        println!(
            "{}",
            json!({
                "history": path,
                "calls": history.ops.len() / 2,
                "valid": report.valid,
                "anomalies": report.anomaly_types,
                "why": why,
            })
        );
    }
}
