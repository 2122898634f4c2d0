from opendata_buffer.commit.committer import Committer as Committer
from opendata_buffer.commit.committer import GroupCommitter as GroupCommitter
from opendata_buffer.commit.durability import DurabilityWatcher as DurabilityWatcher
from opendata_buffer.commit.durability import Durable as Durable
from opendata_buffer.commit.durability import WriteHandle as WriteHandle
