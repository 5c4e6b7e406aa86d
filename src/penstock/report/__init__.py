"""L11: tables, pages and charts for all that measures, simulates or plans. Nothing here is imported to serve."""
