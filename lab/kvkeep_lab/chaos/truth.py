"""What every block of a chaos run must hold: computed once, by an oracle, from the tokens alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkeep.client.copier import row_addresses
from kvkeep.engine.models.model import Rank, Segment
from kvkeep.engine.workers import shape_of
from kvkeep.kv.copy import gather
from kvkeep.kv.identity import tenant_of
from kvkeep.kv.keys import KEY_BYTES, KeyChain, addresses, root_key
from kvkeep.kv.runs import BlockRuns
from kvkeep_lab.chaos.plan import Arrival, Cut


class Truth:
    """Checksums of each shard by the block's address at the server. `learn` every request before it
    can be stored."""

    def __init__(self) -> None:
        self._sums: dict[bytes, tuple[str, NDArray[np.uint64]]] = {}

    def learn(self, arrival: Arrival, cut: Cut) -> None:
        """The blocks of a request and its answer, as engines of this cut store them."""
        model, config = cut.model(), cut.config
        tokens = [*arrival.tokens, *arrival.reference]
        count = -(-len(tokens) // config.block_tokens)
        ranks = []
        for number in range(config.world_size):
            strategy = model.strategy(
                config.tensor_parallel_size, config.pipeline_parallel_size, number
            )
            ranks.append(Rank(strategy, model.allocate_kv(strategy, count, config.block_tokens)))
        shape = shape_of(model, ranks, count, config.block_tokens)
        chain = KeyChain(root_key(shape.identity, arrival.salt), config.block_tokens)
        chain.extend(tokens)
        places = addresses(chain.keys(), shape.fingerprint)
        names = [places[at : at + KEY_BYTES] for at in range(0, len(places), KEY_BYTES)]
        if all(name in self._sums for name in names):
            return
        segment = Segment("truth", arrival.salt, tokens, 0, len(tokens), list(range(count)))
        model.forward([segment], ranks, config.block_tokens)
        sums = np.zeros((len(chain), shape.kv_shards), dtype=np.uint64)
        for rank in ranks:
            runs = BlockRuns.of(rank.kv)
            rows = np.empty((len(chain), runs.nbytes), dtype=np.uint8)
            found = gather(runs, np.arange(len(chain)), row_addresses(rows), verify=True)
            assert found is not None
            sums[:, rank.strategy.kv_rank] = found
        tenant = tenant_of(arrival.salt)
        for at, name in enumerate(names):
            self._sums[name] = (tenant, sums[at])

    def of(self, address: bytes) -> tuple[str, NDArray[np.uint64]] | None:
        """The tenant and the checksum of each shard. None: nobody has computed such a block."""
        return self._sums.get(address)
