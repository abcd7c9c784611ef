//! Names, prices and sizes of models, as configuration gives them.
//!
//! Invariant: a model without a price has no cost; the cost of an unknown model is never zero.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ModelAddress, TokenUsage, address::ModelAddressError};

/// Millionths of a US dollar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MicroDollars(pub u64);

/// The price of a model, in dollars for a million tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// Input that no cache served.
    pub input: f64,
    /// Output.
    pub output: f64,
    /// Input from the cache; the price of input if absent.
    pub cache_read: Option<f64>,
    /// Input that was written to the cache; the price of input if absent.
    pub cache_write: Option<f64>,
}

/// The facts that configuration gives about one model.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelFacts {
    /// The price, if known.
    pub price: Option<Price>,
    /// The length of the context in tokens, if known.
    pub context_tokens: Option<u64>,
    /// The longest answer in tokens, if known.
    pub output_tokens: Option<u32>,
}

/// Aliases of addresses, and facts about models by their names.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelCatalog {
    /// Short names for addresses.
    pub aliases: BTreeMap<String, String>,
    /// Facts by the name of the model, as [`ModelAddress::model`] gives it.
    pub models: BTreeMap<String, ModelFacts>,
}

impl Price {
    /// The cost of some tokens, rounded up to a millionth of a dollar.
    pub fn cost(&self, usage: &TokenUsage) -> MicroDollars {
        // A dollar for a million tokens is a millionth of a dollar for one token.
        let parts = [
            (usage.input, self.input),
            (usage.output, self.output),
            (usage.cache_read, self.cache_read.unwrap_or(self.input)),
            (usage.cache_write, self.cache_write.unwrap_or(self.input)),
        ];
        #[expect(clippy::cast_precision_loss, reason = "token counts stay far below 2^53")]
        let sum: f64 = parts.iter().map(|(tokens, price)| *tokens as f64 * price).sum();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the cast saturates, and configuration refuses negative prices"
        )]
        MicroDollars((sum - 1e-6).ceil().max(0.0) as u64)
    }

    fn is_valid(&self) -> bool {
        let prices = [Some(self.input), Some(self.output), self.cache_read, self.cache_write];
        prices.iter().flatten().all(|price| price.is_finite() && *price >= 0.0)
    }
}

impl ModelCatalog {
    /// Reads an alias or an address.
    pub fn resolve(&self, text: &str) -> Result<ModelAddress, ModelAddressError> {
        self.aliases.get(text).map_or(text, String::as_str).parse()
    }

    /// The facts about a model: under its address if there are any, else under its name alone.
    pub fn facts(&self, address: &ModelAddress) -> Option<&ModelFacts> {
        self.models.get(&address.to_string()).or_else(|| self.models.get(address.model()))
    }

    /// The cost of some tokens of a model; none if its price is unknown.
    pub fn cost(&self, address: &ModelAddress, usage: &TokenUsage) -> Option<MicroDollars> {
        Some(self.facts(address)?.price.as_ref()?.cost(usage))
    }

    /// The first fault: an alias that is no address, or a price that is no amount.
    pub fn find_fault(&self) -> Option<String> {
        let alias = self.aliases.iter().find_map(|(name, address)| {
            let error = address.parse::<ModelAddress>().err()?;
            Some(format!("alias `{name}`: {error}"))
        });
        alias.or_else(|| {
            let (name, _) =
                self.models.iter().find(|(_, facts)| facts.price.is_some_and(|price| !price.is_valid()))?;
            Some(format!("the price of model `{name}` is negative or no number"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn catalog() -> ModelCatalog {
        toml::from_str(
            r#"
            [aliases]
            fast = "openai:small"
            [models.small]
            context_tokens = 1000
            price = { input = 3.0, output = 15.0, cache_read = 0.3, cache_write = 3.75 }
            [models."m@http://h"]
            price = { input = 1.0, output = 2.0 }
            [models.m]
            context_tokens = 5
            "#,
        )
        .unwrap()
    }

    #[test]
    fn a_cost_counts_each_kind_of_token_at_its_price() {
        let catalog = catalog();
        let usage = TokenUsage { input: 1000, output: 100, cache_read: 10_000, cache_write: 200 };
        let cost = |text: &str| catalog.cost(&catalog.resolve(text).unwrap(), &usage);
        assert_eq!(cost("fast"), Some(MicroDollars(3000 + 1500 + 3000 + 750)));
        assert_eq!(cost("m@http://h"), Some(MicroDollars(1000 + 200 + 10_000 + 200)));
        let price = Price { input: 0.1, output: 0.0, cache_read: None, cache_write: None };
        assert_eq!(price.cost(&TokenUsage { input: 1, ..TokenUsage::default() }), MicroDollars(1));
        assert_eq!(price.cost(&TokenUsage { input: 30, ..TokenUsage::default() }), MicroDollars(3));
    }

    #[test]
    fn an_unknown_price_is_no_cost_rather_than_zero() {
        let catalog = catalog();
        let usage = TokenUsage { input: 1, ..TokenUsage::default() };
        for text in ["openai:large", "anthropic:m", "m@http://other"] {
            assert_eq!(catalog.cost(&catalog.resolve(text).unwrap(), &usage), None, "{text}");
        }
    }

    #[test]
    fn faults_of_a_catalog_are_found() {
        assert_eq!(catalog().find_fault(), None);
        let bad: ModelCatalog = toml::from_str("[aliases]\na = 'b'").unwrap();
        assert!(bad.find_fault().unwrap().contains("alias `a`"));
        let bad: ModelCatalog = toml::from_str("[models.m.price]\ninput = -1.0\noutput = nan").unwrap();
        assert!(bad.find_fault().unwrap().contains("`m`"));
        assert!(toml::from_str::<ModelCatalog>("[models.m.price]\ninput = 1.0").is_err());
        assert!(toml::from_str::<ModelCatalog>("[models.m.price]\ninputs = 1.0").is_err());
    }
}
